"""What Ctrl-C and SIGTERM do: end the command with one line, from its first moment to its last.

While nothing is begun the process ends at once. Later an exception is raised, so that what is unfinished is
tidied up. Libraries lose such exceptions, in callbacks that may not raise and where they catch everything, or
cannot bear them: an import that one goes through may end the process, or leave its module half made. So none
is raised within an import, and one that nobody handles is raised again.

This module is loaded before all others and needs nothing but what Python has loaded by then.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # `signal` takes a while to load, in which it can be struck
import os
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import FrameType
    from typing import Any

INTERRUPT, TERMINATE = _signal.SIGINT, _signal.SIGTERM

_CODES = {INTERRUPT: 130, TERMINATE: 143}
_AGAIN = 0.05  # seconds until it is looked at whether an exception is on its way
_PATIENCE = 1.0  # seconds in which a second signal is the first one's echo, as of a group of processes


def words(number: int) -> str:
    """What the user is told."""
    if number == INTERRUPT:
        return "interrupted"
    # a SIGTERM: from a scheduler, or from torchrun when another of its processes ended
    why = " (as torchrun does when another process of the run ended)" if "LOCAL_RANK" in os.environ else ""
    return f"stopped by SIGTERM{why}; the same command goes on from here"


def answer_at_once() -> None:
    """From now on a signal ends the process: nothing is begun that would have to be tidied up."""
    for number in _heard():
        _signal.signal(number, _leave)


def answer_by_exception() -> None:
    """From now on the first signal raises KeyboardInterrupt or SystemExit in the main thread, until
    `answered`. One that comes while that is still under way ends the process."""
    _STOP.over = False
    sys.unraisablehook = _STOP.unraisable
    if hasattr(_signal, "SIGALRM"):
        _signal.signal(_signal.SIGALRM, _STOP.insist)
    for number in _heard():
        _signal.signal(number, _STOP.begin)


class nothing_begun:
    """While this lasts, a signal ends the process at once, where `answer_by_exception` would answer it."""

    def __enter__(self) -> None:
        self._answers = _signal.getsignal(INTERRUPT) == _STOP.begin
        if self._answers:
            answer_at_once()
            if _STOP.number is not None:  # it came before, and could not be raised yet
                _leave(_STOP.number, None)

    def __exit__(self, *error: object) -> None:
        if self._answers:
            answer_by_exception()


def asked() -> BaseException | None:
    """The exception of the signal that came, if one did and it is not answered yet."""
    return None if _STOP.number is None else _STOP.error()


def answered() -> None:
    """The exception has arrived where it ends the command, and no further one is raised."""
    _STOP.over = True
    _STOP.forget()


def end_quietly(code: int) -> None:
    """From now on a signal ends the process with this code, the command's own: all is done and said."""
    _STOP.forget()
    for number in _heard():
        _signal.signal(number, lambda *_: os._exit(code))


def _heard() -> list[int]:
    """All but those that the process was started to ignore, as a shell's jobs in the background are to."""
    return [number for number in _CODES if _signal.getsignal(number) != _signal.SIG_IGN]


def _leave(number: int, frame: FrameType | None) -> None:
    """What is said goes past Python's own streams, which may be in the middle of something."""
    _STOP.forget()  # else what it raises comes between the next two lines
    os.write(2, f"{words(number)}\n".encode())
    os._exit(_CODES[number])


class _Stop:
    """The signal that is being answered."""

    def __init__(self) -> None:
        self.number: int | None = None
        self.over = False
        self._since = 0.0

    def begin(self, number: int, frame: FrameType | None) -> None:
        if self.over:
            return
        if self.number is not None:
            if time.monotonic() - self._since > _PATIENCE:
                _leave(self.number, frame)
            return
        self.number, self._since = number, time.monotonic()
        if hasattr(_signal, "setitimer"):
            _signal.setitimer(_signal.ITIMER_REAL, _AGAIN, _AGAIN)
            self.insist(number, frame)
        else:
            raise self.error()

    def insist(self, number: int, frame: FrameType | None) -> None:
        if self.number is not None and not _is_handled(sys.exc_info()[1]) and not _imports(frame):
            raise self.error()

    def error(self) -> BaseException:
        return KeyboardInterrupt() if self.number == INTERRUPT else SystemExit(_CODES[TERMINATE])

    def forget(self) -> None:
        number, self.number = self.number, None
        if number is not None and hasattr(_signal, "setitimer"):
            _signal.setitimer(_signal.ITIMER_REAL, 0)

    def unraisable(self, lost: Any) -> None:
        """Say nothing of our own exception where it could not be raised: it will be again."""
        if self.number is None or not issubclass(lost.exc_type, (KeyboardInterrupt, SystemExit)):
            sys.__unraisablehook__(lost)


def _is_handled(error: BaseException | None) -> bool:
    """Whether this error is a stop, or came up while one was being handled."""
    while error is not None and not isinstance(error, (KeyboardInterrupt, SystemExit)):
        error = error.__context__
    return error is not None


def _imports(frame: FrameType | None) -> bool:
    """Whether the main thread is at loading a module."""
    while frame is not None and not frame.f_code.co_filename.startswith("<frozen importlib"):
        frame = frame.f_back
    return frame is not None


_STOP = _Stop()
