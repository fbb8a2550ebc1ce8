"""working_folder: where relative paths start, or a clear word where that folder was removed."""

from __future__ import annotations

import os
from pathlib import Path

from merging.errors import SpecError

_left = False


def working_folder(*, needed: bool = True) -> Path:
    """Where relative paths start; not `needed`: where all paths are known to be absolute.

    Raises SpecError where it was removed after somebody went there, and is needed."""
    try:
        here = Path.cwd()
    except FileNotFoundError:
        here = Path("/")
    else:
        if not _left:
            return here
    if needed:
        raise SpecError(
            "the working folder is gone: it was removed, and relative paths start there",
            remedy="Go to a folder that is there (`cd`), or give absolute paths only.",
        )
    return here


def leave_if_gone() -> None:
    """For the command line: go elsewhere from a folder that was removed, where MKL cannot be loaded."""
    global _left
    try:
        os.getcwd()
    except FileNotFoundError:
        os.chdir("/")
        _left = True
