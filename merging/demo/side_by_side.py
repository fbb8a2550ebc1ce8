"""Long work in processes of their own, each of which uses one core.

Two processes of one thread take no longer than one process of two threads, which wait for each other at every
operation: where other programs want the cores too, that waiting made training ten times slower. Nor does the
result depend on how many cores there are.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from merging.cores import cores
from merging.errors import MergingError

_POLL_SECONDS = 0.2


@dataclass(frozen=True)
class Job:
    """`python -m module arguments` makes what `name` says, and writes a byte to stdout for each of its
    steps."""

    name: str
    module: str
    arguments: tuple[str, ...]
    steps: int


@dataclass(frozen=True, eq=False)
class _Running:
    """A process, and the files in which it counts its steps and complains."""

    job: Job
    process: subprocess.Popen[bytes]
    count: Path
    complaints: Path

    def steps(self) -> int:
        return self.count.stat().st_size


def run_side_by_side(jobs: Sequence[Job], report: Callable[[int, int], None]) -> None:
    """As many at a time as there are cores, longest first. Raises MergingError with what a process said."""
    waiting = sorted(jobs, key=lambda job: job.steps)
    total, finished = sum(job.steps for job in jobs), 0
    running: list[_Running] = []
    with tempfile.TemporaryDirectory() as workshop:
        try:
            while waiting or running:
                while waiting and len(running) < cores():
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


def step_counter() -> Callable[[int, int], None]:
    """For a job's own process: tells of each finished step, and stops when whoever wanted it is gone."""
    parent = os.getppid()

    def count(done: int, total: int) -> None:
        if os.getppid() != parent:
            raise SystemExit("whoever wanted this is gone")
        if done:
            sys.stdout.write(".")
            sys.stdout.flush()

    return count


def _start(job: Job, workshop: Path) -> _Running:
    stem = job.name.replace(" ", "-")
    files = {part: workshop / f"{stem}.{part}" for part in ("count", "complaints")}
    command = [sys.executable, "-m", job.module, *job.arguments]
    with files["count"].open("wb") as count, files["complaints"].open("wb") as complaints:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=count, stderr=complaints)
    return _Running(job, process, files["count"], files["complaints"])


def _finish(one: _Running) -> int:
    """The steps that it took."""
    if one.process.returncode:
        said = one.complaints.read_text(errors="replace").strip().splitlines() or ["(nothing)"]
        raise MergingError(
            f"making {one.job.name} ended with code {one.process.returncode}: {said[-1]}",
            remedy="Run again: what is finished is kept. If it was killed, there was too little memory.",
        )
    return one.job.steps
