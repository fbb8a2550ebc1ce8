"""Packages of npm and Debian, fetched and read as those of a Python package index are."""

from __future__ import annotations

import fnmatch
import lzma
import tarfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from io import BytesIO
from pathlib import Path
from typing import ClassVar

from merging.demo.packages import Archive, Package

_AR, _AR_HEADER = b"!<arch>\n", 60


class NpmPackage(Package):
    """A package of the npm registry; `file` is what `npm pack` calls it."""

    registry: ClassVar[str] = "the npm registry"

    @property
    def requirement(self) -> str:
        return f"{self.name}@{self.version}"

    @property
    def by_hand(self) -> str:
        return f"npm pack {self.requirement}"

    def command(self, fetching: Path) -> list[str]:
        return ["npm", "pack", "--silent", self.requirement]

    def archive(self, path: Path) -> Archive:
        return Members(path, _npm)


class DebianPackage(Package):
    """A package of Debian; `file` is what `apt-get download` calls it, a colon in the version as %3a."""

    registry: ClassVar[str] = "Debian's packages (after `apt-get update`)"

    @property
    def requirement(self) -> str:
        return f"{self.name}={self.version}"

    @property
    def by_hand(self) -> str:
        return f"apt-get download {self.requirement}"

    def command(self, fetching: Path) -> list[str]:
        return ["apt-get", "download", "--quiet", self.requirement]

    def archive(self, path: Path) -> Archive:
        return Members(path, _debian)


@dataclass(frozen=True)
class Members(Archive):
    """A compressed tar archive: opened once and kept, since going to a member reads all before it."""

    opened: Callable[[Path], tarfile.TarFile]

    def names(self, pattern: str) -> list[str]:
        return sorted(fnmatch.filter(self._members, pattern))

    def read(self, member: str) -> bytes:
        file = self._tar.extractfile(self._members[member])
        assert file is not None
        return file.read()

    def matching(self, pattern: str) -> dict[str, bytes]:
        # In the order of the archive, which is the fast one.
        found = {name: self.read(name) for name in fnmatch.filter(self._members, pattern)}
        return dict(sorted(found.items()))

    @cached_property
    def _tar(self) -> tarfile.TarFile:
        return self.opened(self.path)

    @cached_property
    def _members(self) -> dict[str, tarfile.TarInfo]:
        return {member.name.removeprefix("./"): member for member in self._tar if member.isfile()}


def _npm(path: Path) -> tarfile.TarFile:
    return tarfile.open(path, mode="r:gz")


def _debian(path: Path) -> tarfile.TarFile:
    """The files of a package: the member `data.tar.xz` of an `ar` archive."""
    data = path.read_bytes()
    if not data.startswith(_AR):
        raise ValueError(f"{path} is not a Debian package")
    place = len(_AR)
    while place + _AR_HEADER <= len(data):
        header = data[place : place + _AR_HEADER]
        name, size = header[:16].decode().strip().rstrip("/"), int(header[48:58])
        content = data[place + _AR_HEADER :][:size] if name.startswith("data.tar") else b""
        if name.startswith("data.tar"):
            plain = lzma.decompress(content) if name.endswith(".xz") else content
            return tarfile.open(fileobj=BytesIO(plain))
        place += _AR_HEADER + size + size % 2
    raise ValueError(f"{path} has no data.tar: not a Debian package")
