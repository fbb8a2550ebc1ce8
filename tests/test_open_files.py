"""The limit on open files is told as such, whatever was to be opened."""

from __future__ import annotations

import errno
import subprocess
import sys

import pytest

from merging.errors import MergingError
from merging.open_files import allow_open_files, telling_of_open_files

resource = pytest.importorskip("resource")

EMFILE = OSError(errno.EMFILE, "Too many open files")


@pytest.mark.parametrize(
    "error",
    [
        EMFILE,
        RuntimeError("cannot open x: Too many open files (os error 24)"),
        ImportError(str(EMFILE)),
        RuntimeError("socket: too many open files"),
    ],
    ids=["os", "safetensors", "import", "socket"],
)
def test_any_of_its_errors_names_the_limit(error):
    with pytest.raises(MergingError, match="too many files are open") as caught, telling_of_open_files():
        raise error

    assert "ulimit -n" in caught.value.remedy


def test_an_error_that_came_of_it_too():
    with pytest.raises(MergingError, match="too many files are open"), telling_of_open_files():
        raise MergingError("the base cannot be read") from EMFILE


@pytest.mark.parametrize("error", [OSError(errno.EACCES, "denied"), MergingError("x"), ValueError("24")])
def test_others_pass(error):
    with pytest.raises(type(error)) as caught, telling_of_open_files():
        raise error

    assert caught.value is error


def limited(monkeypatch, soft, hard):
    """The limits that were set, with these found."""
    given = []
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda kind, limits: given.append(limits))
    return given


def test_a_process_allows_itself_more_where_the_system_lets_it(monkeypatch):
    given = limited(monkeypatch, 8, 4096)

    allow_open_files()

    assert given == [(1024, 4096)]


def test_one_that_may_open_enough_is_left_alone(monkeypatch):
    given = limited(monkeypatch, 4096, 4096)

    allow_open_files()

    assert given == []


@pytest.mark.parametrize(("limit", "processes", "fits"), [(8, 1, False), (16, 1, True), (16, 4, False)])
def test_too_few_for_any_run_are_refused_before_it(monkeypatch, limit, processes, fits):
    limited(monkeypatch, limit, limit)
    monkeypatch.setenv("WORLD_SIZE", str(processes))

    if fits:
        allow_open_files()
    else:
        with pytest.raises(MergingError, match=f"no more than {limit}, and needs") as caught:
            allow_open_files()
        assert "ulimit -n" in caught.value.remedy


def test_a_run_that_may_open_eight_files_ends_at_once(tmp_path):
    (tmp_path / "spec.json").write_text("{}")
    ended = subprocess.run(
        [sys.executable, "-m", "merging", "pipeline", "run", str(tmp_path / "spec.json")],
        capture_output=True,
        text=True,
        timeout=20,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (8, 8)),
        check=False,
    )

    assert ended.returncode == 1
    assert ended.stderr.startswith("error: too few files may be open: this process may have no more than 8")
    assert len(ended.stderr.splitlines()) == 2
