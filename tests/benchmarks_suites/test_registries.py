"""Packages of npm and Debian, read without unpacking."""

from __future__ import annotations

import hashlib
import tarfile
from io import BytesIO
from pathlib import Path

import pytest

from benchmarks.suites.registries import DebianPackage, NpmPackage
from merging.demo.packages import Package, fetch
from merging.errors import MergingError

FILES = {"package/data/a.txt": b"first", "package/data/b.txt": b"second", "package/c.md": b"third"}


def tar(kind: str) -> bytes:
    found = BytesIO()
    with tarfile.open(fileobj=found, mode=f"w:{kind}") as archive:
        for name, data in FILES.items():
            member = tarfile.TarInfo(f"./{name}" if kind == "xz" else name)
            member.size = len(data)
            archive.addfile(member, BytesIO(data))
    return found.getvalue()


def deb(*members: tuple[str, bytes]) -> bytes:
    """An `ar` archive: each member behind 60 bytes that tell its name and size, at an even place."""
    content = b"!<arch>\n"
    for name, data in members:
        content += f"{name:<16}{0:<12}{0:<6}{0:<6}{'100644':<8}{len(data):<10}`\n".encode()
        content += data + b"\n" * (len(data) % 2)
    return content


def package(kind: type[Package], data: bytes) -> Package:
    return kind("thing", "1:2.0-3", "thing.file", len(data), hashlib.sha256(data).hexdigest())


@pytest.mark.parametrize("kind", [NpmPackage, DebianPackage])
def test_files_are_found_and_read(tmp_path: Path, kind: type[Package]) -> None:
    files = [("debian-binary", b"2.0"), ("control.tar.xz", b"x"), ("data.tar.xz", tar("xz"))]
    data = tar("gz") if kind is NpmPackage else deb(*files)
    (tmp_path / "thing.file").write_bytes(data)

    archive = package(kind, data).open_in(tmp_path)

    assert archive.names("package/data/*") == ["package/data/a.txt", "package/data/b.txt"]
    assert archive.read("package/c.md") == b"third"
    assert archive.matching("*.txt") == {name: data for name, data in FILES.items() if name.endswith("txt")}


def test_a_file_that_is_no_debian_package_is_refused(tmp_path: Path) -> None:
    for data, said in ((b"something else", "is not a Debian package"), (deb(("a", b"b")), "has no data.tar")):
        (tmp_path / "thing.file").write_bytes(data)
        with pytest.raises(ValueError, match=said):
            package(DebianPackage, data).open_in(tmp_path).names("*")


def test_other_bytes_are_refused(tmp_path: Path) -> None:
    (tmp_path / "thing.file").write_bytes(tar("gz"))

    with pytest.raises(MergingError, match=r"is not the thing@1:2\.0-3"):
        package(NpmPackage, b"others").open_in(tmp_path)


@pytest.mark.parametrize(
    ("kind", "by_hand"),
    [(NpmPackage, "npm pack thing@1:2.0-3"), (DebianPackage, "apt-get download thing=1:2.0-3")],
)
def test_without_the_registrys_client_the_command_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type[Package], by_hand: str
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))

    with pytest.raises(MergingError, match="is not installed") as caught:
        fetch(tmp_path / "packages", lambda *_: None, [package(kind, b"data")])

    assert by_hand in str(caught.value)
    assert not list((tmp_path / "packages").iterdir())
