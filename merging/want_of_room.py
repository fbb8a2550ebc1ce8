"""want_of_room: a run that finds its disk full says so, whatever was being written."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from merging.errors import MergingError

_TIGHT = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_TOLD = re.compile(r"\(os error (\d+)\)")  # as safetensors tells of an OSError
_REMEDY = "Make room, or choose an output path on another disk; the same command goes on from here."
LARGER = (
    "Raise the limit on the size of files (`ulimit -f`; some file systems have one of their own), or give a "
    'smaller "shard_size" under "output".'
)


@contextmanager
def want_of_room(out: Path) -> Iterator[None]:
    """Raise MergingError for any write that failed for lack of room. `out`: the run's folder.

    An error that tells of it already, with what to do, is left as it is."""
    try:
        yield
    except Exception as error:
        number = _number(error)
        if number is None or (isinstance(error, MergingError) and error.remedy):
            raise
        limited = number == errno.EFBIG
        what = f"no room to write in {out}"
        what = error.message if isinstance(error, MergingError) else f"{what}: {os.strerror(number)}"
        raise MergingError(what, remedy=LARGER if limited else _REMEDY) from error


def _number(error: BaseException) -> int | None:
    """The system's number for the lack of room that this error is or was caused by; None if it was not."""
    cause: BaseException | None = error
    while cause is not None:
        number = cause.errno if isinstance(cause, OSError) else None
        if type(cause).__name__ == "SafetensorError" and (told := _TOLD.search(str(cause))):
            number = int(told[1])
        if number in _TIGHT:
            return number
        cause = cause.__cause__
    return None
