"""Progress on stderr: one live line per stage on a terminal, plain lines now and then elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from merging.contracts.method import Progress, silent

from .output import is_main_process, say

if TYPE_CHECKING:
    from rich.progress import TaskID

_PAUSE = 30.0  # seconds after which a plain line comes though little was done
_ADVANCE = 10  # per cent after which one comes earlier
_LONGEST = 24 * 3600.0  # seconds beyond which nobody can say when it ends
_REDRAW = 0.1  # seconds between updates of the live line
_KNOWN = 0.2  # share by which the pace may have changed between a stage's halves, for its end to be foretold
_KEPT = 64  # moments of a stage that are remembered
_BYTES_FROM = 100_000  # totals above this count bytes: no run has so many blocks, batches or tensors


@contextmanager
def progress_to_stderr(*, quiet: bool = False) -> Iterator[Progress]:
    """A callback for long work."""
    if quiet or not is_main_process():
        yield silent
    elif sys.stderr.isatty():
        with _live() as progress:
            yield progress
    else:
        yield PlainProgress()


class PlainProgress:
    """A line when a stage begins, one for every tenth of it or half a minute in which something was done,
    and one when it ends."""

    def __init__(
        self, print_line: Callable[[str], None] = say, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._print, self._clock = print_line, clock
        self._stage: str | None = None
        self._began = self._told = 0.0
        self._pace = Pace(0.0, 0)
        self._ended = False
        self._share, self._amount = 0.0, ""  # of the line before

    def __call__(self, stage: str, done: int, total: int) -> None:
        now, share, told = self._clock(), 100 * done / total if total else 0.0, amount(done, total)
        if begins := stage != self._stage:
            self._stage, self._began, self._ended = stage, now, False
            self._pace = Pace(now, done)
        self._pace.add(now, done)
        if not begins and (self._ended or (done < total and not self._is_news(now, share, told))):
            return
        self._told, self._ended, self._share, self._amount = now, done >= total, share, told
        pace = self._pace
        self._print(
            line(
                stage,
                done,
                total,
                advanced=pace.advanced,
                seconds=pace.seconds,
                known=pace.known,
                elapsed=now - self._began,
            )
        )

    def _is_news(self, now: float, share: float, told: str) -> bool:
        return told != self._amount and (share - self._share >= _ADVANCE or now - self._told >= _PAUSE)


class Pace:
    """How fast a stage goes: from its last moment of no progress at all, for starting up is no measure."""

    def __init__(self, now: float, done: int) -> None:
        self._moments = [(now, done)]  # about evenly spaced
        self._last = (now, done)
        self._gap = 0.0

    def add(self, now: float, done: int) -> None:
        if done > self._last[1]:
            self._last = (now, done)
            if now - self._moments[-1][0] >= self._gap:
                self._moments.append(self._last)
        elif len(self._moments) == 1 and self._last == self._moments[0]:
            self._moments[0] = self._last = (now, done)
        if len(self._moments) > _KEPT:
            self._moments = self._moments[::2]
            self._gap = (self._moments[-1][0] - self._moments[0][0]) / len(self._moments)

    @property
    def advanced(self) -> int:
        return self._last[1] - self._moments[0][1]

    @property
    def seconds(self) -> float:
        return self._last[0] - self._moments[0][0]

    @property
    def known(self) -> bool:
        """Whether it goes on as it began: until then nobody can say when it ends."""
        (start, first), (end, last) = self._moments[0], self._last
        before = [moment for moment in self._moments[1:] if moment[0] <= (start + end) / 2]
        if not before or end <= start:
            return False
        middle, half = before[-1]
        whole, late = (last - first) / (end - start), (last - half) / (end - middle)
        return abs(late - whole) <= _KNOWN * whole


def line(
    stage: str,
    done: int,
    total: int,
    *,
    advanced: int,
    seconds: float,
    known: bool = True,
    elapsed: float | None = None,
) -> str:
    """`merge  45 %  1.2 GB of 3.0 GB  310 MB/s  6 s left`

    `known`: whether the pace foretells the end; `elapsed`: seconds of the stage, where not all count."""
    share = f"{100 * done / total:.0f} %" if total else "0 %"
    parts = [f"{stage:<12}", f"{share:>5}", amount(done, total)]
    if advanced > 0 and seconds > 0:
        parts.append(f"{rate(advanced / seconds, total)}")
        if done >= total:
            parts.append(f"done in {duration(seconds if elapsed is None else elapsed)}")
        elif known and (left := (total - done) * seconds / advanced) <= _LONGEST:
            parts.append(f"{duration(left)} left")
    return "  ".join(parts)


def amount(done: float, total: float) -> str:
    if total < _BYTES_FROM:
        return f"{done:.0f} of {total:.0f}"
    return f"{size(done)} of {size(total)}"


def rate(per_second: float, total: float) -> str:
    if total >= _BYTES_FROM:
        return f"{size(per_second)}/s"
    return f"{per_second:.0f}/s" if per_second >= 100 else f"{per_second:.3g}/s"


def size(count: float) -> str:
    """Bytes in decimal units, three digits."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 999.5:
            return f"{count:.0f} B" if unit == "B" else f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.4g} TB"


def duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


@contextmanager
def _live() -> Iterator[Progress]:
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn
    from rich.progress import Progress as Bars

    columns = (
        TextColumn("{task.description:<12}", markup=False),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f} %", markup=False),
        TextColumn("{task.fields[amount]}", markup=False),
        TextColumn("{task.fields[rate]}", markup=False),
        TextColumn("{task.fields[left]}", markup=False),
    )
    tasks: dict[str, TaskID] = {}
    paces: dict[str, Pace] = {}
    told: dict[str, float] = {}
    with Bars(*columns, console=Console(stderr=True)) as bars:

        def update(stage: str, done: int, total: int) -> None:
            now = time.monotonic()
            if stage not in tasks:
                tasks[stage] = bars.add_task(stage, total=total, amount="", rate="", left="")
                paces[stage], told[stage] = Pace(now, done), now - _REDRAW
            pace = paces[stage]
            pace.add(now, done)
            if now - told[stage] < _REDRAW and done < total:
                return
            told[stage] = now
            speed = rate(pace.advanced / pace.seconds, total) if pace.seconds > 0 else ""
            left = (total - done) * pace.seconds / pace.advanced if pace.known and done < total else _LONGEST
            bars.update(
                tasks[stage],
                completed=done,
                total=total,
                amount=amount(done, total),
                rate=speed,
                left=f"{duration(left)} left" if left < _LONGEST else "",
            )

        yield update
