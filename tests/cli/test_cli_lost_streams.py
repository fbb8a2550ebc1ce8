"""Streams that take nothing, as on a full disk: what is made is there, and the user is told where."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

pytestmark = pytest.mark.skipif(
    not os.path.exists("/dev/full"), reason="a file on a disk that is always full"
)


@pytest.fixture
def spec(tmp_path: Path) -> Path:
    for name in ("base", "a"):
        (tmp_path / name).mkdir()
        save_file({"weight": torch.ones(2, 3)}, tmp_path / name / "model.safetensors")
    content = {"base": "base", "experts": {"a": "a"}, "merge": {"type": "average"}}
    (tmp_path / "spec.json").write_text(json.dumps({**content, "output": {"path": "out"}, "device": "cpu"}))
    return tmp_path / "spec.json"


def ended(words: list[str], *, full: str, buffered: bool) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "" if buffered else "1"}
    with open("/dev/full", "w") as nowhere:
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, full: nowhere}
        return subprocess.run(
            [sys.executable, "-m", "merging", *words],
            env=environment,
            text=True,
            timeout=120,
            check=False,
            **streams,
        )


@pytest.mark.parametrize(("more", "buffered"), [((), True), (("--json",), True), (("--json",), False)])
def test_a_run_whose_answer_cannot_be_written_says_so_and_keeps_its_results(
    spec: Path, more: tuple[str, ...], buffered: bool
) -> None:
    done = ended(["pipeline", "run", str(spec), "-q", *more], full="stdout", buffered=buffered)

    assert done.returncode == 1
    assert done.stderr.startswith(
        "error: stdout: the answer cannot be written there (No space left on device)"
    )
    assert len(done.stderr.splitlines()) == 2, done.stderr
    assert (spec.parent / "out" / "merged" / "manifest.json").is_file()


@pytest.mark.parametrize("words", [["--version"], ["--help"], ["pipeline", "schema"]])
def test_any_answer_that_cannot_be_written_is_one_error(words: list[str]) -> None:
    done = ended(words, full="stdout", buffered=True)

    assert done.returncode == 1
    assert done.stderr.startswith("error: stdout:"), done.stderr
    assert len(done.stderr.splitlines()) == 2, done.stderr


def test_an_error_that_cannot_be_written_as_json_is_told_on_stderr(tmp_path: Path) -> None:
    missing = str(tmp_path / "none.json")

    done = ended(["pipeline", "validate", missing, "--json"], full="stdout", buffered=True)

    assert done.returncode == 2
    assert done.stderr.startswith(f"error: there is no file {missing}"), done.stderr


@pytest.mark.parametrize(("there", "code"), [(True, 0), (False, 2)])
def test_talk_that_cannot_be_written_changes_nothing_else(spec: Path, there: bool, code: int) -> None:
    if not there:
        spec.unlink()

    done = ended(["pipeline", "run", str(spec)], full="stderr", buffered=True)

    assert done.returncode == code
    assert done.stdout.strip().endswith(str(spec.parent / "out" / "merged")) is there
