"""telling_of_open_files: a process that may open no more files says so, whatever was to be opened; and
allow_open_files: one that may open too few for any run says so at once."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from merging.errors import MergingError

_TOO_MANY = (errno.EMFILE, errno.ENFILE)
_NUMBERS = "|".join(map(str, _TOO_MANY))
_TOLD = re.compile(rf"\(os error ({_NUMBERS})\)|\[Errno ({_NUMBERS})\]|too many open files", re.IGNORECASE)
_USUAL = 1024  # more than any run needs; some systems give 256
_LEAST = (
    16  # with which small runs end well; with fewer, libraries may wait forever for what they cannot open
)
_PER_PROCESS = 2  # sockets, to each other process of a run
_REMEDY = "Allow more (`ulimit -n 1024`), and run it again: what is finished is kept."


@contextmanager
def telling_of_open_files() -> Iterator[None]:
    """Raise MergingError for any error that is, or was caused by, the limit on open files."""
    try:
        yield
    except Exception as error:
        if not _is_of_them(error):
            raise
        what = f"too many files are open: this process may have no more{_limit()}"
        raise MergingError(what, remedy=_REMEDY) from error


def allow_open_files() -> None:
    """Allow this process as many open files as a run may need, where the system lets it.

    Raises MergingError where it does not, and they are too few for any run."""
    try:
        import resource
    except ImportError:  # not on Windows
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return
    wanted = _USUAL if hard == resource.RLIM_INFINITY else min(_USUAL, hard)
    allowed = soft
    if allowed < wanted:
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            allowed = wanted
    processes = _processes()
    needed = _LEAST + (_PER_PROCESS * processes if processes > 1 else 0)
    if allowed < needed:
        raise MergingError(
            f"too few files may be open: this process may have no more than {allowed}, and needs {needed}",
            remedy=_REMEDY,
        )


def _processes() -> int:
    """Of this run, as torchrun says."""
    told = os.environ.get("WORLD_SIZE", "")
    return int(told) if told.isdecimal() else 1


def _is_of_them(error: BaseException) -> bool:
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno in _TOO_MANY:
            return True
        if not isinstance(cause, MergingError) and _TOLD.search(str(cause)):
            return True  # as safetensors, and libraries that load others, tell of it
        cause = cause.__cause__
    return False


def _limit() -> str:
    try:
        import resource
    except ImportError:  # not on Windows
        return ""
    return f" than {resource.getrlimit(resource.RLIMIT_NOFILE)[0]}"
