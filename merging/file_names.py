"""file_names: a name of a file that this process cannot write or say is told as that.

Reports and manifests are UTF-8; where the locale knows less, files with other letters cannot be opened.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from merging.errors import MergingError, SpecError

_LONGEST, _DEEPEST, _LONGEST_NAME = 3500, 200, 255  # Linux takes 4,096 bytes of a path, 255 of a name
_SHOWN = 160  # characters of a name in a message
_LOCALE = (
    "Run it in a locale with all letters: `export LC_ALL=C.UTF-8`, or PYTHONUTF8=1 before Python starts."
)
_RENAME = "Rename it: the names of files and folders have to be UTF-8 text, as reports and manifests are."


def refuse_unnameable(path: Path) -> None:
    """Raises SpecError where the path is not UTF-8 text, or cannot be given to the system by this process."""
    text = str(path)
    encoding = sys.getfilesystemencoding()
    for codec in ("utf-8", encoding):
        try:
            text.encode(codec)
        except UnicodeEncodeError as error:
            what, remedy = _told(error)
            raise SpecError(what, remedy=remedy) from error


def too_long(path: Path) -> str | None:
    """What is wrong with an output folder's path of more bytes or folders, or of longer names, than file
    systems take, with what a run writes in it."""
    size, deep = _bytes(str(path)), len(path.parts) - 1
    longest = max(map(_bytes, path.parts), default=0)
    if size > _LONGEST or deep > _DEEPEST:
        return f"it is {size} bytes long and {deep} folders deep, expected at most {_LONGEST} and {_DEEPEST}"
    if longest > _LONGEST_NAME:
        return f"a name in it is {longest} bytes long, expected at most {_LONGEST_NAME}"
    return None


def _bytes(text: str) -> int:
    return len(text.encode("utf-8", "surrogatepass"))


@contextmanager
def telling_of_names() -> Iterator[None]:
    """Raise MergingError for any error that is, or was caused by, a name that cannot be written or given to
    the system."""
    try:
        yield
    except Exception as error:
        found = _name_error(error)
        if found is None or isinstance(error, MergingError):
            raise
        what, remedy = _told(found)
        raise MergingError(what, remedy=remedy) from error


def _name_error(error: BaseException) -> UnicodeEncodeError | None:
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, UnicodeEncodeError) and _is_name(cause):
            return cause
        cause = cause.__cause__
    return None


def _is_name(error: UnicodeEncodeError) -> bool:
    """Whether the system's own encoding lacks the letters, or they are bytes of a name that is no text."""
    lacking = error.object[error.start : error.end]
    raw = all("\ud800" <= letter <= "\udfff" for letter in lacking)
    return raw or error.encoding.lower() == sys.getfilesystemencoding().lower()


def _told(error: UnicodeEncodeError) -> tuple[str, str]:
    shown = error.object.encode("ascii", "backslashreplace").decode()
    shown = shown if len(shown) <= _SHOWN else f"...{shown[3 - _SHOWN :]}"
    if error.encoding.lower() in ("utf-8", "utf8"):
        return f'"{shown}" is not UTF-8 text', _RENAME
    return f'"{shown}" cannot be named in the locale of this process ({error.encoding})', _LOCALE
