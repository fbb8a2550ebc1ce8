"""How messages write JSON paths and values."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping


def counted(number: int, what: str) -> str:
    """`1 tensor`, `3 tensors`."""
    return f"{number} {what}{'' if number == 1 else 's'}"


def described(value: object) -> str:
    """A JSON value as a message calls it: `the text "abc"`, `a list`."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        try:
            return f"the number {shortened(str(value))}"
        except ValueError:  # Python does not write numbers of thousands of digits
            return "a number of thousands of digits"
    if isinstance(value, str):
        return f'the text "{shortened(value)}"' if value else "an empty text"
    if isinstance(value, Mapping):
        return "an object"
    return "a list" if isinstance(value, list | tuple) else f"a {type(value).__name__}"


def shortened(text: str, width: int = 80) -> str:
    """At most `width` characters, on one line."""
    text = "".join(character if character.isprintable() else "?" for character in text)
    return text if len(text) <= width else f"{text[: width - 3]}..."


def join(where: str, *keys: object) -> str:
    """A JSON path: `tasks.mnist.test`; keys that hold a dot or the like are quoted, as in `--set`."""
    parts = [where] if where else []
    for key in map(str, keys):
        parts.append(key if re.fullmatch(r"[\w@+-]+", key) else json.dumps(key, ensure_ascii=False))
    return ".".join(parts)
