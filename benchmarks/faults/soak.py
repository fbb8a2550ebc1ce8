"""Many runs in one process: resident memory, open files and threads must stay what they are after a few."""

from __future__ import annotations

import argparse
import gc
import os
import shutil
import statistics
import sys
import threading
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path

from benchmarks.faults import workshop
from benchmarks.faults.forge import entry
from benchmarks.section import Found, table

_WARM = 0.2  # share of the runs that may still make the process grow
_GROWTH = 2.0  # MiB that memory may grow from the first quarter of the others to their last


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--runs", type=int, default=100, help="how many runs, of the backbones in turn (100)")


def measured(options: argparse.Namespace) -> Found:
    workshop.settle(options.work)
    words = {}
    for backbone in workshop.BACKBONES:
        folder = options.work / backbone
        workshop.models(folder, backbone)
        spec = workshop.written(folder / "spec.json", workshop.spec(folder, backbone))
        words[backbone] = ["pipeline", "run", str(spec), "--quiet", "--out", str(folder / "out")]
    seen: list[tuple[float, int, int]] = []
    with Path(os.devnull).open("w") as nowhere:
        for number in range(options.runs):
            backbone = workshop.BACKBONES[number % len(workshop.BACKBONES)]
            shutil.rmtree(options.work / backbone / "out", ignore_errors=True)
            with redirect_stdout(nowhere):
                code = entry().main(words[backbone])
            if code:
                raise RuntimeError(f"run {number} of {backbone} ended with {code}")
            gc.collect()
            seen.append((_resident(), len(os.listdir("/proc/self/fd")), threading.active_count()))
            if number % 10 == 0:
                print(
                    f"run {number}: {seen[-1][0]:.1f} MiB, {seen[-1][1]} files", file=sys.stderr, flush=True
                )
    left = len([one for one in (options.work / "tmp").iterdir() if not one.name.startswith("torchinductor")])
    return Found("Many runs in one process", _body(seen, left), faults=faults(seen))


def faults(seen: Sequence[tuple[float, int, int]]) -> list[str]:
    """What grows, of (MiB, open files, threads) after each run."""
    warm = seen[int(len(seen) * _WARM) :]
    first, last = _quarters(warm)
    found = [] if last - first < _GROWTH else [f"memory grows by {last - first:.1f} MiB"]
    for name, place in (("open files", 1), ("threads", 2)):
        numbers = {one[place] for one in warm}
        if len(numbers) > 1:
            found.append(f"{name} vary: {min(numbers)} to {max(numbers)}")
    return found


def _quarters(warm: Sequence[tuple[float, int, int]]) -> tuple[float, float]:
    share = max(1, len(warm) // 4)
    memory = [one[0] for one in warm]
    return statistics.median(memory[:share]), statistics.median(memory[-share:])


def _resident() -> float:
    """MiB."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def _body(seen: Sequence[tuple[float, int, int]], left: int) -> Sequence[str]:
    warm = seen[int(len(seen) * _WARM) :]
    first, last = _quarters(warm)
    rows = [
        ["resident memory, MiB", f"{seen[0][0]:.1f}", f"{first:.1f}", f"{last:.1f}"],
        ["open files", str(seen[0][1]), str(warm[0][1]), str(warm[-1][1])],
        ["threads of Python", str(seen[0][2]), str(warm[0][2]), str(warm[-1][2])],
    ]
    heads = ["", "after the first run", f"first quarter from run {len(seen) - len(warm)} on", "last quarter"]
    told = (
        f"{len(seen)} runs of merge, calibrate and evaluate, of {', '.join(workshop.BACKBONES)} in turn; "
        f"medians of a quarter. {left} files are left in the folder of temporary files."
    )
    return [table(heads, rows), told]
