"""Names of tasks, files and settings inside Markdown: shown as they are, never as markup."""

from __future__ import annotations

import re

_HTML = str.maketrans({"&": "&amp;", "<": "&lt;"})
_INLINE = re.compile(r"([\\`*_\[\]|~$])")
_AT_START = re.compile(r"^(\d*)([#>+-]|(?<=\d)[.)](?!\d))")


def escaped(text: str) -> str:
    """One line, safe in a Markdown paragraph, heading or table cell."""
    line = _INLINE.sub(r"\\\1", " ".join(text.split()).translate(_HTML))
    return _AT_START.sub(r"\1\\\2", line)
