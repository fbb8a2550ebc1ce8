"""Runs of two processes, started by torchrun: the tensors of one, and what happens when one of them dies."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import expert_of, made, pixels

TASKS = ("a", "b", "c")


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("workshop")
    _, base, _ = made("clip")
    base.save_pretrained(folder / "base")
    for seed, task in enumerate(TASKS):
        changed = type(base)(base.config)
        changed.load_state_dict(expert_of(base, seed + 1))
        changed.save_pretrained(folder / task)
        save_file(pixels(20, seed=seed), folder / f"{task}.safetensors")
    return folder


def spec(folder: Path, merge: dict[str, object], calibrate: list[dict[str, object]]) -> Path:
    data = {"type": "tensors", "batch_size": 8}
    tasks = {task: {"calibration": {**data, "path": f"{task}.safetensors"}} for task in TASKS}
    content = {
        "base": "base",
        "experts": {task: task for task in TASKS},
        "merge": merge,
        "calibrate": calibrate,
        "tasks": tasks,
    }
    path = folder / "spec.json"
    path.write_text(json.dumps(content))
    return path


def command(processes: int) -> list[str]:
    if processes == 1:
        return [sys.executable, "-m", "merging"]
    launcher = "torch.distributed.run"
    return [sys.executable, "-m", launcher, "--standalone", f"--nproc-per-node={processes}", "-m", "merging"]


def run(path: Path, out: Path, processes: int) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [*command(processes), "pipeline", "run", str(path), "--out", str(out), "--quiet"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.mark.parametrize(
    ("merge", "calibrate"),
    [
        ({"type": "ties"}, [{"type": "featcal"}]),
        ({"type": "chain_of_merges"}, []),
    ],
)
def test_two_processes_make_the_tensors_of_one(
    workshop: Path, tmp_path: Path, merge: dict[str, object], calibrate: list[dict[str, object]]
) -> None:
    path = spec(workshop, merge, calibrate)
    final = "calibrated" if calibrate else "merged"
    found = {}
    for processes in (1, 2):
        result = run(path, tmp_path / str(processes), processes)
        assert result.returncode == 0, result.stderr
        assert result.stdout.strip().splitlines()[-1] == str(tmp_path / str(processes) / final)
        found[processes] = load_file(tmp_path / str(processes) / final / "model.safetensors")
    if not calibrate:
        merged = found
    else:
        merged = {n: load_file(tmp_path / str(n) / "merged" / "model.safetensors") for n in (1, 2)}
        assert all(torch.equal(merged[1][name], merged[2][name]) for name in merged[1])
    for name, tensor in found[1].items():
        torch.testing.assert_close(found[2][name], tensor, rtol=1e-4, atol=1e-5)
    report = json.loads((tmp_path / "2" / "report.json").read_text())
    assert len(report["solver"]) == len(json.loads((tmp_path / "1" / "report.json").read_text())["solver"])


def test_when_one_process_is_killed_the_others_end_soon_and_a_new_run_finishes(
    workshop: Path, tmp_path: Path
) -> None:
    path, out = spec(workshop, {"type": "average"}, [{"type": "featcal"}]), tmp_path / "out"
    launched = subprocess.Popen(
        [*command(2), "pipeline", "run", str(path), "--out", str(out)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    killed = _kill_a_worker(launched, out / "merged")
    start = time.monotonic()
    talk, _ = launched.communicate(timeout=90)

    assert killed
    assert time.monotonic() - start < 60
    assert launched.returncode != 0
    assert "another process of this run ended" in talk or "stopped" in talk or "interrupted" in talk, talk
    assert not re.search(r'File ".*/(merging|merging_cli|cli)/', talk), talk  # torchrun shows one of its own
    again = run(path, out, 1)
    assert again.returncode == 0, again.stderr
    assert (out / "calibrated" / "model.safetensors").is_file()


def _kill_a_worker(launched: subprocess.Popen[str], sign: Path) -> bool:
    """Kill the second worker once `sign` is there."""
    end = time.monotonic() + 120
    while time.monotonic() < end and launched.poll() is None:
        if sign.exists():
            listed = subprocess.run(
                ["pgrep", "-P", str(launched.pid)], capture_output=True, text=True, check=False
            )
            workers = [int(word) for word in listed.stdout.split()]
            if len(workers) >= 2:
                os.kill(workers[-1], signal.SIGKILL)
                return True
        time.sleep(0.01)
    return False
