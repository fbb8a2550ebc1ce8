"""Measuring whole processes, in turn with others: wall time, processor time, memory.

The process that measures imports no torch and stays small: Linux bills a child with the memory that its
parent held when the child was started."""

from __future__ import annotations

import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

REPOSITORY = Path(__file__).parent.parent
MEASUREMENTS = "measurements.jsonl"  # in the scratch folder: every run
_INTERVAL = 0.02  # seconds between two looks at the memory
_DROP_CACHES = Path("/proc/sys/vm/drop_caches")


class BenchmarkError(Exception):
    """What the person who asked for the benchmark has to know or to do."""


@dataclass(frozen=True)
class Contender:
    """One command that takes part in a comparison."""

    label: str
    command: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    fresh: tuple[Path, ...] = ()  # folders removed before every run
    report: Path | None = None  # where the run leaves a report.json with its stages
    may_fail: bool = False  # a peer: its failure is a row of the table


@dataclass(frozen=True)
class Measurement:
    """One run of one contender. Memory in MiB: `peak` as the kernel counts it, mapped files included;
    `anonymous` and `mapped` are the peaks of its two parts, sampled."""

    label: str
    wall: float
    user: float
    system: float
    peak: float
    anonymous: float
    mapped: float
    load_before: float
    load_after: float
    stages: Mapping[str, float] = field(default_factory=dict)
    failure: str = ""

    @property
    def processor(self) -> float:
        """Seconds of all cores."""
        return self.user + self.system

    def without(self, *stages: str) -> float:
        """Wall seconds without these stages."""
        return self.wall - sum(self.stages.get(stage, 0.0) for stage in stages)


Runs = dict[str, list[Measurement]]


def in_turn(
    contenders: Sequence[Contender],
    *,
    runs: int,
    work: Path,
    warmup: int = 0,
    cold: bool = False,
    about: str = "",
) -> Runs:
    """A B C A B C ...: each contender `runs` times, so that what else the machine does strikes all alike.

    Every run is also a line of measurements.jsonl, and what the commands say goes to output.log.
    `cold`: the page cache is dropped before every run (needs root). A peer that fails once is left out of the
    rounds that follow; any other failure raises BenchmarkError."""
    work.mkdir(parents=True, exist_ok=True)
    found: Runs = {contender.label: [] for contender in contenders}
    for number in range(warmup + runs):
        for contender in contenders:
            if any(run.failure for run in found[contender.label]):
                continue
            run = once(contender, work / "output.log", cold=cold)
            if run.failure and not contender.may_fail:
                raise BenchmarkError(f"{contender.label} failed: {run.failure} (see {work / 'output.log'})")
            _say(f"{about} {contender.label}: {run.failure or f'{run.wall:.2f} s, {run.peak:.0f} MiB'}")
            if number >= warmup or run.failure:
                found[contender.label].append(run)
                with (work / MEASUREMENTS).open("a", encoding="utf-8") as lines:
                    lines.write(json.dumps({"command": contender.command, **asdict(run)}) + "\n")
    return found


def once(contender: Contender, log: Path, *, cold: bool = False) -> Measurement:
    """Run it once, from a clean start: its folders removed, dirty pages of what came before written out."""
    for folder in contender.fresh:
        shutil.rmtree(folder, ignore_errors=True)
    os.sync()
    if cold:
        _DROP_CACHES.write_text("3")
    before, start_of_log = os.getloadavg()[0], log.stat().st_size if log.exists() else 0
    with log.open("ab") as output:
        start = time.monotonic()
        process = subprocess.Popen(
            contender.command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            cwd=REPOSITORY,
            env={**os.environ, **contender.environment},
        )
        watch = _Watch(process.pid)
        _, status, usage = os.wait4(process.pid, 0)
        wall = time.monotonic() - start
        process.returncode = os.waitstatus_to_exitcode(status)
        watch.stop()
    own_peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    peak = max(usage.ru_maxrss if usage.ru_maxrss > own_peak else 0, watch.peaks.get("VmHWM", 0))
    failed = process.returncode != 0
    return Measurement(
        label=contender.label,
        wall=wall,
        user=usage.ru_utime,
        system=usage.ru_stime,
        peak=peak / 1024,
        anonymous=watch.peaks.get("RssAnon", 0) / 1024,
        mapped=watch.peaks.get("RssFile", 0) / 1024,
        load_before=before,
        load_after=os.getloadavg()[0],
        stages={} if failed or contender.report is None else _stages(contender.report),
        failure=f"exit {process.returncode}: {_last_line(log, start_of_log)}" if failed else "",
    )


def _say(line: str) -> None:
    print(line.strip(), file=sys.stderr, flush=True)


def median(runs: Sequence[Measurement], of: Callable[[Measurement], float]) -> float:
    return statistics.median(of(run) for run in runs)


def of_stage(name: str) -> Callable[[Measurement], float]:
    """Seconds of this stage; 0 where a run had none of that name."""
    return lambda run: run.stages.get(name, 0.0)


def ratio(
    runs: Sequence[Measurement],
    to: Sequence[Measurement],
    of: Callable[[Measurement], float] = lambda run: run.wall,
) -> float:
    """How many times as much the first takes as the second: the median over the rounds."""
    return statistics.median(of(one) / of(other) for one, other in zip(runs, to, strict=True))


class _Watch(threading.Thread):
    """The largest values seen of a process and its children, in KiB: of one process, not of their sum."""

    def __init__(self, process: int) -> None:
        super().__init__(daemon=True)
        self.peaks: dict[str, int] = {}
        self._process, self._stopped = process, threading.Event()
        self.start()

    def run(self) -> None:
        while not self._stopped.wait(_INTERVAL):
            for process in _family(self._process):
                for name, kib in _memory(process).items():
                    self.peaks[name] = max(self.peaks.get(name, 0), kib)

    def stop(self) -> None:
        self._stopped.set()
        self.join()


def _family(process: int) -> list[int]:
    found, waiting = [], [process]
    while waiting:
        one = waiting.pop()
        found.append(one)
        for children in Path(f"/proc/{one}/task").glob("*/children"):
            try:
                waiting += [int(child) for child in children.read_text().split()]
            except OSError:  # it has ended meanwhile
                continue
    return found


def _memory(process: int) -> dict[str, int]:
    try:
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
    except OSError:  # it has ended meanwhile
        return {}
    pairs = (line.split(":", 1) for line in lines if line.startswith(("RssAnon", "RssFile", "VmHWM")))
    return {name: int(rest.split()[0]) for name, rest in pairs}


def _stages(report: Path) -> dict[str, float]:
    stages = json.loads(report.read_text(encoding="utf-8"))["stages"]
    return {stage["name"]: stage["seconds"] for stage in stages}


def _last_line(log: Path, start: int) -> str:
    with log.open("rb") as output:
        output.seek(start)
        said = output.read().decode(errors="replace").split("\n")
    return next((line.strip() for line in reversed(said) if line.strip()), "nothing was said")
