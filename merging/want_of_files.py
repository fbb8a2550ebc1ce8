"""want_of_files: a run from under which files are taken away says whose they were, and what to do."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from merging.errors import MergingError

if TYPE_CHECKING:
    from merging.opened import Input

_GONE = (errno.ENOENT, errno.ENOTDIR, errno.ESTALE)
_REMEDY = "Put it back, and leave it there until the run has ended; the same command goes on from here."
_OURS = "Let nothing else work in that folder; the same command makes again what is missing."


@contextmanager
def want_of_files(inputs: Callable[[], Mapping[str, Input]], out: Path | None = None) -> Iterator[None]:
    """Raise MergingError for a file that was there when the run began and is there no more.

    `inputs`: by role, all that is known to be read. `out`: the run's folder."""
    try:
        yield
    except Exception as error:
        path = _lost(error)
        if path is None:
            raise
        roles = _roles(path, inputs())
        within = out is not None and path.is_relative_to(out)
        if not (roles or within):
            raise
        whose, remedy = (", ".join(roles), _REMEDY) if roles else ("the output folder", _OURS)
        raise MergingError(f"{whose}: {path} is gone, though the run has not ended", remedy=remedy) from error


def _lost(error: BaseException) -> Path | None:
    """The file that was missing, where that is or has caused this error."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno in _GONE:
            names = [Path(name) for name in (cause.filename, cause.filename2) if isinstance(name, str)]
            # Of what was to be renamed, the place to which; the file itself is tidied away by now.
            missing = sorted((one for one in names if not one.exists()), key=lambda one: one.parent.exists())
            if missing:
                return missing[0].absolute()
        cause = cause.__cause__
    return None


def _roles(path: Path, inputs: Mapping[str, Input]) -> list[str]:
    """Whose file it is: where several folders lie in each other, that of the innermost."""
    found = {
        role: max((len(one.parts) for one in (given.path, *given.files) if _holds(one, path)), default=0)
        for role, given in inputs.items()
    }
    deepest = max(found.values(), default=0)
    return [role for role, depth in found.items() if depth == deepest > 0]


def _holds(place: Path, path: Path) -> bool:
    """The hashes of a file are those of what a link leads to, so that this counts too."""
    return path.is_relative_to(place) or path.is_relative_to(place.resolve())
