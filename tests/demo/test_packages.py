"""Wheels: what is accepted, what is said when there is none, and that reading leaves no trace."""

from __future__ import annotations

import hashlib
import tarfile
import zipfile
from io import BytesIO
from pathlib import Path

import pytest

from merging.contracts.method import silent
from merging.demo.packages import Archive, Package, fetch, table, unpacked
from merging.errors import MergingError


def a_wheel(folder: Path, members: dict[str, bytes]) -> Path:
    path = folder / "some_package-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return path


def a_tar(members: dict[str, bytes]) -> bytes:
    stream = BytesIO()
    with tarfile.open(fileobj=stream, mode="w:gz") as archive:
        for name, content in members.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, BytesIO(content))
    return stream.getvalue()


def the_package(path: Path) -> Package:
    content = path.read_bytes()
    return Package("some-package", "1.0", path.name, len(content), hashlib.sha256(content).hexdigest())


def test_a_wheel_that_is_there_is_not_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = the_package(a_wheel(tmp_path, {"inside.txt": b"hello"}))
    monkeypatch.setattr("merging.demo.packages._download", None)

    wheels = fetch(tmp_path, silent, (package,))

    assert wheels["some-package"].read("inside.txt") == b"hello"


def test_a_wheel_of_other_content_is_refused(tmp_path: Path) -> None:
    path = a_wheel(tmp_path, {"inside.txt": b"hello"})
    package = the_package(path)
    path.write_bytes(path.read_bytes() + b"!")

    with pytest.raises(MergingError, match=r"not the some-package==1\.0(.|\n)*expected sha256"):
        fetch(tmp_path, silent, (package,))


def test_a_failed_download_names_the_package_and_a_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"NO_INDEX": "1", "FIND_LINKS": str(tmp_path), "CONFIG_FILE": "/dev/null"}.items():
        monkeypatch.setenv(f"PIP_{name}", value)
    package = Package("merging-demo-nowhere", "1.0", "merging_demo_nowhere-1.0-py3-none-any.whl", 1, "0")

    with pytest.raises(
        MergingError, match=r"could not download merging-demo-nowhere==1\.0(.|\n)*pip download"
    ):
        fetch(tmp_path / "wheels", silent, (package,))

    assert list((tmp_path / "wheels").iterdir()) == []


def test_a_download_without_pip_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", "/bin/false")
    package = Package("some-package", "1.0", "some_package-1.0-py3-none-any.whl", 1, "0")

    with pytest.raises(MergingError, match="could not download"):
        fetch(tmp_path, silent, (package,))


def test_members_that_point_outside_are_read_without_writing_anything(tmp_path: Path) -> None:
    folder = tmp_path / "downloads"
    folder.mkdir()
    wheel = Archive(
        a_wheel(folder, {"../outside.ttf": b"font", "fonts/a.ttf": b"font", "fonts/a.json": b"{}"})
    )

    contents = [wheel.read(name) for name in wheel.names("*.ttf")]

    assert contents == [b"font", b"font"]
    assert [path.name for path in tmp_path.rglob("*")] == ["downloads", wheel.path.name]


@pytest.mark.parametrize("suffix", [".whl", ".tar.gz"])
def test_wheels_and_source_distributions_are_read_alike(tmp_path: Path, suffix: str) -> None:
    members = {"some-1.0/b.txt": b"b", "some-1.0/a.txt": b"a", "some-1.0/a.bin": b""}
    path = tmp_path / f"some-1.0{suffix}"
    if suffix == ".whl":
        a_wheel(tmp_path, members).rename(path)
    else:
        path.write_bytes(a_tar(members))

    archive = Archive(path)

    assert archive.names("*.txt") == ["some-1.0/a.txt", "some-1.0/b.txt"]
    assert archive.matching("*.txt") == {"some-1.0/a.txt": b"a", "some-1.0/b.txt": b"b"}
    assert archive.read("some-1.0/b.txt") == b"b"


def test_an_archive_inside_an_archive_is_unpacked_in_memory(tmp_path: Path) -> None:
    path = tmp_path / "some-1.0.tar.gz"
    path.write_bytes(a_tar({"some-1.0/inner.tar.gz": a_tar({"inner/ratings.txt": b"1"})}))

    inner = unpacked(Archive(path).read("some-1.0/inner.tar.gz"), "*/ratings.txt")

    assert inner == {"inner/ratings.txt": b"1"}


@pytest.mark.parametrize(
    ("file", "choice"), [("a-1.0.tar.gz", "--no-binary a"), ("a-1.0-py3-none-any.whl", "--only-binary a")]
)
def test_pip_is_told_the_hash_and_the_kind_of_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str, choice: str
) -> None:
    """A setup.py is only run when pip has compared the hash."""
    fake_pip = tmp_path / "python"
    fake_pip.write_text('#!/bin/sh\necho "$@"\nfor last; do :; done\ncat "$last"\nexit 1\n')
    fake_pip.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(fake_pip))

    with pytest.raises(MergingError) as caught:
        fetch(tmp_path / "packages", silent, (Package("a", "1.0", file, 1, "12ab"),))

    assert f"download --no-deps {choice} " in str(caught.value)
    assert "a==1.0 --hash=sha256:12ab" in str(caught.value)


def test_where_things_come_from_is_a_table() -> None:
    package = Package("a", "1.0", "a-1.0.tar.gz", 1, "12ab", licence="MIT", gives="letters")

    assert table([package]).splitlines()[-1] == "| `a==1.0` | letters | MIT |"
