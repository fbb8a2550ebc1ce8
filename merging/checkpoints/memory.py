"""read_memory, save_memory: what is remembered of files between runs, in a JSON file of the cache folder."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from merging.checkpoints.atomic import write_atomic
from merging.errors import OutputError

Value = TypeVar("Value")

_KEPT = 20_000  # entries, the latest


def read_memory(place: Path, is_value: Callable[[Any], bool]) -> dict[str, Any]:
    """Nothing where there is none yet, or where it is spoilt: all is found out anew then."""
    try:
        found = json.loads(place.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) and all(map(is_value, found.values())) else {}


def save_memory(place: Path, new: Mapping[str, Value], is_value: Callable[[Any], bool]) -> bool:
    """Add to what is there, also by another process meanwhile; whether it was saved. A cache that cannot be
    written is no error."""
    everything = list({**read_memory(place, is_value), **new}.items())
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(place, json.dumps(dict(everything[-_KEPT:]), indent=0))
    except (OSError, OutputError):
        return False
    return True
