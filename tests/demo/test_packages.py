"""Wheels: what is accepted, what is said when there is none, and that reading leaves no trace."""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path

import pytest

from merging.contracts.method import silent
from merging.demo.packages import Package, Wheel, fetch
from merging.errors import MergingError


def a_wheel(folder: Path, members: dict[str, bytes]) -> Path:
    path = folder / "some_package-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return path


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
    wheel = Wheel(a_wheel(folder, {"../outside.ttf": b"font", "fonts/a.ttf": b"font", "fonts/a.json": b"{}"}))

    contents = [wheel.read(name) for name in wheel.names("*.ttf")]

    assert contents == [b"font", b"font"]
    assert [path.name for path in tmp_path.rglob("*")] == ["downloads", wheel.path.name]
