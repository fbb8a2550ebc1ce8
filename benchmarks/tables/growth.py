"""How time and memory grow: FeatCal with samples, tasks, depth; rules without data with experts and size."""

from __future__ import annotations

import argparse
import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.inputs import TOY_CLIP, TOY_LLAMA, Pictures, Texts, at_hand
from benchmarks.measure import Measurement, in_turn, median, of_stage
from benchmarks.plot import log_log
from benchmarks.product import AGAIN, Product
from benchmarks.section import Found, table
from benchmarks.shapes import ClipVision, Llama, parameters
from benchmarks.tables.calibrate import spec as calibrating

SMALL_CLIP = ClipVision(hidden=512, layers=12, intermediate=2048, heads=8)
SMALL_LLAMA = Llama(1024, 8, 2816, 16, 4, 32000)  # 0.3 GB in bf16
FLAT = ("average", "ties")
_BYTES = 2  # of a parameter in bf16


@dataclass(frozen=True)
class Sizes:
    """What is varied, and the middle from which one thing at a time is varied."""

    clip: ClipVision
    llama: Llama
    samples: tuple[int, ...]
    tasks: tuple[int, ...]
    depth: tuple[int, ...]
    experts: tuple[int, ...]
    gigabytes: tuple[float, ...]
    middle: tuple[int, int, int]  # samples, tasks, depth


FULL = Sizes(
    SMALL_CLIP,
    SMALL_LLAMA,
    (32, 64, 128, 256),
    (2, 4, 8),
    (3, 6, 12),
    (2, 4, 8, 16),
    (0.3, 1, 2, 4),
    (64, 4, 6),
)
TOY = Sizes(TOY_CLIP, TOY_LLAMA, (4, 8), (2, 3), (1, 2), (2, 3), (1e-4, 2e-4), (4, 2, 2))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--plot", type=Path, help="SVG of time and memory; with --write it goes beside the page"
    )
    parser.add_argument("--only", nargs="+", choices=("featcal", *FLAT), default=["featcal", *FLAT])


def measured(options: argparse.Namespace) -> Found:
    sizes = TOY if options.toy else FULL
    rows: list[list[str]] = []
    seconds: dict[str, list[tuple[float, float]]] = {}
    memory: dict[str, list[tuple[float, float]]] = {}
    known: dict[str, list[Measurement]] = {}  # series meet in their middle
    for title, points in _series(sizes, options):
        for _, point in points:
            if point.about not in known:
                known[point.about] = _measured(point, options)
        found = [(value, known[point.about]) for value, point in points]
        stage = "calibrate" if title.startswith("featcal") else "merge"
        seconds[title] = [(value, median(runs, of_stage(stage))) for value, runs in found]
        memory[title] = [(value, median(runs, lambda one: one.peak)) for value, runs in found]
        anonymous = [(value, median(runs, lambda one: one.anonymous)) for value, runs in found]
        rows.append(_row(title, seconds[title], memory[title], anonymous))
    heads = (
        "",
        "stage seconds",
        "exponent",
        "peak MiB",
        "exponent",
        "most / least",
        "anonymous MiB",
        "most / least",
    )
    body = [table(heads, rows), NOTE]
    if plot := options.plot or (options.write and options.write.with_name("growth.svg")):
        named = {f"{title}: {exponent(points):.2f}": points for title, points in seconds.items()}
        plot.parent.mkdir(parents=True, exist_ok=True)
        text = log_log(
            "Seconds of the stage, and the exponent of their growth", "multiple of the smallest", "s", named
        )
        plot.write_text(text, encoding="utf-8")
        body.append(f"![seconds against samples, tasks, depth, experts and size]({plot.name})")
        other = plot.with_stem(f"{plot.stem}-memory")
        other.write_text(log_log("Peak memory", "multiple of the smallest", "MiB", memory), encoding="utf-8")
        body.append(f"![peak memory against the same]({other.name})")
    return Found("Growth of time and memory", body)


NOTE = (
    "Exponents are least-squares slopes in log-log axes: 1 is linear, 0 flat. Seconds are those of the "
    "stage (calibrate; merge), without imports; peak is the whole process, mapped files included. Merges "
    "find their inputs hashed already."
)


def exponent(points: Sequence[tuple[float, float]]) -> float:
    """Slope of the straight line through the logarithms that is nearest to them."""
    xs, ys = [math.log(x) for x, _ in points], [math.log(y) for _, y in points]
    middle_x, middle_y = sum(xs) / len(xs), sum(ys) / len(ys)
    above = sum((x - middle_x) * (y - middle_y) for x, y in zip(xs, ys, strict=True))
    return above / sum((x - middle_x) ** 2 for x in xs)


@dataclass(frozen=True)
class Point:
    """One run: its inputs, made when it is its turn, and the spec that they are asked for with."""

    about: str
    folder: str
    inputs: Texts | Pictures
    spec: Callable[[Path], Mapping[str, Any]]


_Series = list[tuple[str, list[tuple[float, Point]]]]


def _series(sizes: Sizes, options: argparse.Namespace) -> _Series:
    """Title -> what is varied, and how it is run."""
    found: _Series = []
    samples, tasks, depth = sizes.middle
    if "featcal" in options.only:
        found += [
            ("featcal, samples", [(n, _featcal(sizes, n, tasks, depth)) for n in sizes.samples]),
            ("featcal, tasks", [(n, _featcal(sizes, samples, n, depth)) for n in sizes.tasks]),
            ("featcal, depth", [(n, _featcal(sizes, samples, tasks, n)) for n in sizes.depth]),
        ]
    for rule in FLAT:
        if rule in options.only:
            found.append((f"{rule}, experts", [(n, _merge(rule, sizes.llama, n)) for n in sizes.experts]))
            sized = [(size, _merge(rule, _of_size(sizes.llama, size), 2)) for size in sizes.gigabytes]
            found.append((f"{rule}, GB a model", sized))
    return found


def _featcal(sizes: Sizes, samples: int, tasks: int, depth: int) -> Point:
    shape = replace(sizes.clip, layers=depth)
    inputs = Pictures(shape, max(sizes.tasks), max(sizes.samples))
    asked = replace(inputs, tasks=tasks)
    return Point(
        f"featcal samples={samples} tasks={tasks} depth={depth}",
        f"growth_clip_{shape.hidden}_{depth}",
        inputs,
        lambda models: calibrating("featcal", models, asked, samples),
    )


def _merge(rule: str, shape: Llama, experts: int) -> Point:
    def spec(models: Path) -> Mapping[str, Any]:
        names = [f"expert{number + 1}" for number in range(experts)]
        return {
            "base": str(models / "base"),
            "experts": {name: str(models / name) for name in names},
            "merge": {"type": rule},
        }

    return Point(
        f"{rule} experts={experts} layers={shape.layers}",
        f"growth_llama_{shape.hidden}_{shape.layers}_{experts}",
        Texts(shape, experts),
        spec,
    )


def _measured(point: Point, options: argparse.Namespace) -> list[Measurement]:
    """Where the merge stage counts, after a run that does not, which hashes the inputs."""
    models = at_hand(options.inputs / point.folder, point.inputs)
    product = Product.of(options.work / "run", point.spec(models))
    calibrated = point.about.startswith("featcal")
    contender = product.first(AGAIN) if calibrated else product.again()
    runs = in_turn(
        [contender],
        runs=options.runs,
        warmup=0 if calibrated else 1,
        work=options.work,
        cold=options.cold,
        about=point.about,
    )
    shutil.rmtree(product.folder)
    return runs[AGAIN]


def _of_size(shape: Llama, gigabytes: float) -> Llama:
    """With as many blocks as make the size: the largest tensor stays what it is."""
    none, one = parameters(replace(shape, layers=0)), parameters(replace(shape, layers=1))
    blocks = (gigabytes * 1e9 / _BYTES - none) / (one - none)
    return replace(shape, layers=max(1, round(blocks)))


def _row(
    title: str,
    seconds: Sequence[tuple[float, float]],
    peak: Sequence[tuple[float, float]],
    anonymous: Sequence[tuple[float, float]],
) -> list[str]:
    return [
        title,
        ", ".join(f"{value:g}: {found:.2f}" for value, found in seconds),
        f"{exponent(seconds):.2f}",
        ", ".join(f"{found:.0f}" for _, found in peak),
        f"{exponent(peak):.2f}",
        f"{_most_to_least(peak):.2f}",
        ", ".join(f"{found:.0f}" for _, found in anonymous),
        f"{_most_to_least(anonymous):.2f}",
    ]


def _most_to_least(points: Sequence[tuple[float, float]]) -> float:
    values = [value for _, value in points]
    return max(values) / min(values)
