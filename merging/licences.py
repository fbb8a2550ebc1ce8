"""licence_of: under which terms a model may be used, as far as its own files say."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

_CARD, _LARGEST = "README.md", 1 << 16  # bytes that are read of a card: what comes first
_FRONT_MATTER = re.compile(r"---\r?\n(.*?)\r?\n---\s", re.DOTALL)
_LONGEST = 80  # letters of a licence's name
_FILES = ("LICENSE*", "LICENCE*", "COPYING*", "USE_POLICY*")


def licence_of(folder: Path) -> str:
    """The identifier in the model card's front matter, else the names of files with the terms; else empty.

    What the owner calls the licence counts where the identifier is `other`. A card that cannot be read says
    nothing."""
    stated = _front_matter(folder / _CARD)
    licence = stated.get("license")
    names = licence if isinstance(licence, list) else [licence]
    if names == ["other"]:
        names = [stated.get("license_name") or "other"]
    told = ", ".join(_shown(name) for name in names if isinstance(name, str) and name.strip())
    if told:
        return told
    files = sorted({path.name for pattern in _FILES for path in folder.glob(pattern) if path.is_file()})
    return f"see {', '.join(map(_shown, files[:3]))}" if files else ""


def _front_matter(card: Path) -> dict[str, Any]:
    if not card.is_file():
        return {}
    try:
        with card.open("rb") as file:
            text = file.read(_LARGEST).decode("utf-8", "replace")
        match = _FRONT_MATTER.match(text)
        found = yaml.safe_load(match[1]) if match is not None else None
    except (OSError, yaml.YAMLError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _shown(name: str) -> str:
    return " ".join(name.split())[:_LONGEST]
