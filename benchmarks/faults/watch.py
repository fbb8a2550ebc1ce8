"""A watch over one call: how it ends, how long it takes, what memory it adds, where it writes."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

LIMIT = 10.0  # seconds of the processor
_PATIENCE = 30  # times as many may pass in all, as others may be at work
_MEMORY = 600 * 2**20  # bytes that one call may add to what is resident
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_MOVES = {
    "os.rename",
    "os.remove",
    "os.rmdir",
    "os.mkdir",
    "os.link",
    "os.symlink",
    "os.chmod",
    "os.truncate",
}
_OUTSIDE = {"socket.connect", "subprocess.Popen", "os.system", "os.exec", "os.posix_spawn"}


class Hang(BaseException):
    """Raised in a call that takes too long; no `except Exception` holds it up."""


@dataclass(frozen=True)
class Outcome:
    """`kind`: "done", the name of the MergingError, or "fault", with what was wrong."""

    kind: str
    what: str
    seconds: float


class _Listener:
    """The audit hook, which cannot be taken away again: it listens while there are places to guard."""

    def __init__(self) -> None:
        self.allowed: Sequence[str] | None = None
        self.heard: list[str] = []
        self.installed = False

    def hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.allowed is None:
            return
        if event in _OUTSIDE:
            self.heard.append(f"{event} {arguments!r}"[:200])
        elif event == "open":
            path, mode, flags = arguments
            writes = any(letter in (mode or "") for letter in "wax+") or (flags or 0) & _WRITES
            if writes:
                self._judge(event, path)
        elif event in _MOVES:
            if event in ("os.remove", "os.rmdir") and arguments[-1] >= 0:  # relative to an open folder
                self._judge(event, f"{os.readlink(f'/proc/self/fd/{arguments[-1]}')}/{arguments[0]}")
                return
            for path in arguments[: 2 if event in ("os.rename", "os.link") else 1]:
                self._judge(event, path)

    def _judge(self, event: str, path: Any) -> None:
        if isinstance(path, int):
            return
        place = os.path.abspath(os.fsdecode(path))
        if not any(
            place == one or place.startswith(f"{one}/")
            for one in (*(self.allowed or ()), "/dev", "/proc/self")
        ):
            self.heard.append(f"{event} of {place}")


_LISTENER = _Listener()


def watched(action: Callable[[], Any], allowed: Sequence[Path], limit: float = LIMIT) -> Outcome:
    """Call it. It may write below `allowed`, succeed, or raise a MergingError; everything else is a fault."""
    from merging.errors import MergingError

    if not _LISTENER.installed:
        sys.addaudithook(_LISTENER.hook)
        _LISTENER.installed = True
    _LISTENER.heard, _LISTENER.allowed = [], [os.path.abspath(one) for one in allowed]
    before, start = _resident(), time.process_time()
    previous = {sign: signal.signal(sign, _hang) for sign in (signal.SIGPROF, signal.SIGALRM)}
    signal.setitimer(signal.ITIMER_PROF, limit)
    signal.setitimer(signal.ITIMER_REAL, _PATIENCE * limit)
    try:
        action()
        kind, what = "done", ""
    except MergingError as error:
        kind, what = type(error).__name__, str(error)
        if not error.message.strip() or "Traceback" in what:
            kind = "fault"
            what = f"an error that says nothing: {what[:200]!r}"
    except Hang:
        kind, what = "fault", f"longer than {limit:.0f} s"
    except BaseException as error:
        kind, what = "fault", f"{type(error).__name__}: {str(error)[:300]} ({_where(error)})"
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        for sign, handler in previous.items():
            signal.signal(sign, handler)
        _LISTENER.allowed = None
    seconds = time.process_time() - start
    if kind != "fault" and _LISTENER.heard:
        kind, what = "fault", f"it reached out of its folder: {_LISTENER.heard[0]}"
    if kind != "fault" and _resident() - before > _MEMORY:
        kind, what = "fault", f"it added {(_resident() - before) >> 20} MiB of memory"
    return Outcome(kind, what, seconds)


def _hang(number: int, frame: FrameType | None) -> None:
    raise Hang


def _where(error: BaseException) -> str:
    """The last line of this package's own code that the error went through."""
    place, trace = "", error.__traceback__
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if "merging" in file:
            place = f"{Path(file).name}:{trace.tb_lineno}"
        trace = trace.tb_next
    return place


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
