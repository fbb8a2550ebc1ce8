"""Too little address space (`ulimit -v`) ends in one error that says so, whatever a library does then."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from merging import address_space
from merging.errors import MergingError
from merging.room import machine_memory
from merging.want_of_memory import telling_of_memory

resource = pytest.importorskip("resource")


def test_a_run_that_cannot_load_its_libraries_says_so_in_one_error(tmp_path: Path) -> None:
    for name in ("base", "a"):
        (tmp_path / name).mkdir()
        save_file({"weight": torch.zeros(2, 2)}, tmp_path / name / "model.safetensors")
    spec = {"base": "base", "experts": {"a": "a"}, "merge": {"type": "average"}}
    (tmp_path / "spec.json").write_text(json.dumps(spec))

    ended = subprocess.run(
        [sys.executable, "-m", "merging", "pipeline", "run", str(tmp_path / "spec.json")],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (400 << 20, 400 << 20)),
        check=False,
    )

    assert ended.returncode == 1
    assert ended.stdout == ""
    assert ended.stderr.startswith("error: out of memory: this process may have no more than 0.4 GiB")
    assert "ulimit -v" in ended.stderr
    assert len(ended.stderr.splitlines()) == 2
    assert not (tmp_path / "spec-out").exists()


def test_a_library_that_never_returns_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(address_space, "_TRIAL", "while True: pass  # {limit} {processor}")
    monkeypatch.setattr(address_space, "_PATIENCE", 0.5)
    monkeypatch.setattr(address_space, "limit_of_space", lambda: 3 << 30)

    with pytest.raises(MergingError, match=r"no more than 3\.0 GiB of address space"):
        address_space._try()


def test_where_they_can_be_loaded_nothing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(address_space, "_TRIAL", "pass  # {limit} {processor}")
    monkeypatch.setattr(address_space, "limit_of_space", lambda: 3 << 30)

    address_space._try()


def test_the_memory_of_the_machine_is_at_most_what_is_left_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("merging.room.space_left", lambda: 1 << 20)
    total, available = machine_memory()
    monkeypatch.setattr("merging.room.space_left", lambda: None)
    all_of_it, _ = machine_memory()

    assert total is not None
    assert all_of_it is not None
    assert total == available
    assert total < all_of_it


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
        RuntimeError("std::bad_alloc"),
        RuntimeError("can't start new thread"),
        ImportError("libtorch_cpu.so: failed to map segment from shared object"),
    ],
    ids=["python", "system", "c++", "thread", "library"],
)
def test_each_way_in_which_it_shows_is_told_alike(error: Exception) -> None:
    with pytest.raises(MergingError, match="out of memory") as caught, telling_of_memory():
        raise error

    assert caught.value.remedy


def test_what_failed_when_the_space_was_used_up_failed_for_that(monkeypatch: pytest.MonkeyPatch) -> None:
    odd = SystemError("error return without exception set")
    with pytest.raises(SystemError), telling_of_memory():
        raise odd
    monkeypatch.setattr("merging.want_of_memory.space_ran_out", lambda: True)
    monkeypatch.setattr(
        "merging.want_of_memory.told_limit", lambda: "this process may have no more than 4 GiB"
    )

    with pytest.raises(MergingError, match="no more than 4 GiB"), telling_of_memory():
        raise odd
    with pytest.raises(BrokenPipeError), telling_of_memory(BrokenPipeError):
        raise BrokenPipeError
