"""telling_of_open_files: a process that may open no more files says so, whatever was to be opened."""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator
from contextlib import contextmanager

from merging.errors import MergingError

_TOO_MANY = (errno.EMFILE, errno.ENFILE)
_NUMBERS = "|".join(map(str, _TOO_MANY))
_TOLD = re.compile(rf"\(os error ({_NUMBERS})\)|\[Errno ({_NUMBERS})\]")
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
