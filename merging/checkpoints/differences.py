"""Where two specs differ, key by key, with both values."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from merging.errors import Problem

_ABSENT = object()
_SHOWN = 5


def differences(before: Any, now: Mapping[str, Any]) -> list[Problem]:
    """The first keys in which they differ: `merge.scale: 0.3 there, 0.4 now`."""
    old, new = _flat(before), _flat(now)
    keys = [key for key in dict.fromkeys([*old, *new]) if old.get(key, _ABSENT) != new.get(key, _ABSENT)]
    found = [Problem(key, f"{_shown(old, key)} there, {_shown(new, key)} now") for key in keys[:_SHOWN]]
    return [*found, Problem("", f"and {len(keys) - _SHOWN} more")] if len(keys) > _SHOWN else found


def _shown(values: Mapping[str, Any], key: str) -> str:
    return json.dumps(values[key], ensure_ascii=False, default=str) if key in values else "not set"


def _flat(value: Any, path: str = "") -> dict[str, Any]:
    if isinstance(value, Mapping) and value:
        inner: dict[str, Any] = {}
        for key, part in value.items():
            inner |= _flat(part, f"{path}.{key}" if path else str(key))
        return inner
    return {path: value}
