"""Experts trained side by side, each in a process of its own that uses one core.

Two processes of one thread take no longer than one process of two threads, which wait for each other at every
operation: where other programs want the cores too, that waiting made training ten times slower. Nor does the
result depend on how many cores there are.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from merging.demo.experts import train_expert
from merging.demo.heads import head_of
from merging.demo.publishing import published
from merging.demo.tasks import Pictures
from merging.errors import MergingError

_POLL_SECONDS = 0.2


@dataclass(frozen=True, eq=False)
class Training:
    """One expert to be made, and its head unless that is there: each file appears when it is whole."""

    base: Path
    pictures: Pictures
    classes: int
    head: Path
    folder: Path
    steps: int
    seed: int


@dataclass(frozen=True, eq=False)
class _Running:
    """A process, and the files in which it counts its steps (a byte each) and complains."""

    training: Training
    process: subprocess.Popen[bytes]
    count: Path
    complaints: Path

    def steps(self) -> int:
        return self.count.stat().st_size


def train_side_by_side(trainings: Sequence[Training], report: Callable[[int, int], None]) -> None:
    """As many at a time as there are cores, longest first. Raises MergingError with what a process said."""
    waiting = sorted(trainings, key=lambda training: training.steps)
    total, finished = sum(training.steps for training in trainings), 0
    running: list[_Running] = []
    with tempfile.TemporaryDirectory() as workshop:
        try:
            while waiting or running:
                while waiting and len(running) < _cores():
                    running.append(_start(waiting.pop(), Path(workshop)))
                report(finished + sum(one.steps() for one in running), total)
                time.sleep(_POLL_SECONDS)
                for one in [one for one in running if one.process.poll() is not None]:
                    running.remove(one)
                    finished += _finish(one)
        finally:
            for one in running:
                one.process.kill()
                one.process.wait()
    report(total, total)


def _start(training: Training, workshop: Path) -> _Running:
    files = {
        part: workshop / f"{training.folder.name}.{part}" for part in ("pictures", "count", "complaints")
    }
    pictures = training.pictures
    save_file(
        {"pixels": torch.from_numpy(pictures.pixels), "labels": torch.from_numpy(pictures.labels)},
        files["pictures"],
    )
    command = [sys.executable, "-m", __name__]
    command += map(str, (training.base, files["pictures"], training.head, training.folder))
    command += map(str, (training.classes, training.steps, training.seed))
    with files["count"].open("wb") as count, files["complaints"].open("wb") as complaints:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=count, stderr=complaints)
    return _Running(training, process, files["count"], files["complaints"])


def _finish(one: _Running) -> int:
    """The steps that it took."""
    if one.process.returncode:
        said = one.complaints.read_text(errors="replace").strip().splitlines() or ["(nothing)"]
        name, code = one.training.folder.name, one.process.returncode
        raise MergingError(
            f"training the expert {name} ended with code {code}: {said[-1]}",
            remedy="Run again: what is finished is kept. If it was killed, there was too little memory.",
        )
    return one.training.steps


def _cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def _main() -> None:
    """One training, in the process made for it."""
    parser = argparse.ArgumentParser()
    for name in ("base", "pictures", "head", "folder"):
        parser.add_argument(name, type=Path)
    for name in ("classes", "steps", "seed"):
        parser.add_argument(name, type=int)
    given = parser.parse_args()
    stored = load_file(given.pictures)
    pictures = Pictures(stored["pixels"].numpy(), stored["labels"].numpy())
    parent = os.getppid()

    def count(done: int, total: int) -> None:
        if os.getppid() != parent:
            raise SystemExit("whoever wanted this expert is gone")
        if done:
            sys.stdout.write(".")
            sys.stdout.flush()

    torch.set_num_threads(1)
    if not given.head.exists():
        with published(given.head) as making:
            save_file(head_of(given.base, pictures, given.classes), making)
    head = load_file(given.head)
    with published(given.folder) as making:
        train_expert(given.base, pictures, head, making, steps=given.steps, seed=given.seed, report=count)


if __name__ == "__main__":
    _main()
