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
        self._first = 0
        self._ended = False
        self._share, self._amount = 0.0, ""  # of the line before

    def __call__(self, stage: str, done: int, total: int) -> None:
        now, share, told = self._clock(), 100 * done / total if total else 0.0, amount(done, total)
        if stage != self._stage:
            self._stage, self._began, self._first, self._ended = stage, now, done, False
        elif self._ended or (done < total and not self._is_news(now, share, told)):
            return
        self._told, self._ended, self._share, self._amount = now, done >= total, share, told
        self._print(line(stage, done, total, advanced=done - self._first, seconds=now - self._began))

    def _is_news(self, now: float, share: float, told: str) -> bool:
        return told != self._amount and (share - self._share >= _ADVANCE or now - self._told >= _PAUSE)


def line(stage: str, done: int, total: int, *, advanced: int, seconds: float) -> str:
    """`merge  45 %  1.2 GB of 3.0 GB  310 MB/s  6 s left`"""
    share = f"{100 * done / total:.0f} %" if total else "0 %"
    parts = [f"{stage:<12}", f"{share:>5}", amount(done, total)]
    if advanced > 0 and seconds > 0:
        parts.append(f"{rate(advanced / seconds, total)}")
        if done >= total:
            parts.append(f"done in {duration(seconds)}")
        elif (left := (total - done) * seconds / advanced) <= _LONGEST:
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
    from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bars

    columns = (
        TextColumn("{task.description:<12}", markup=False),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f} %", markup=False),
        TextColumn("{task.fields[amount]}", markup=False),
        TextColumn("{task.fields[rate]}", markup=False),
        TimeRemainingColumn(),
    )
    tasks: dict[str, TaskID] = {}
    began: dict[str, tuple[float, int]] = {}
    told: dict[str, float] = {}
    with Bars(*columns, console=Console(stderr=True)) as bars:

        def update(stage: str, done: int, total: int) -> None:
            now = time.monotonic()
            if stage not in tasks:
                tasks[stage] = bars.add_task(stage, total=total, amount="", rate="")
                began[stage] = (now, done)
            elif now - told[stage] < _REDRAW and done < total:
                return
            told[stage] = now
            start, first = began[stage]
            speed = rate((done - first) / (now - start), total) if now > start and done > first else ""
            bars.update(tasks[stage], completed=done, total=total, amount=amount(done, total), rate=speed)

        yield update
