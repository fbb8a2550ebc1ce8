"""`--set merge.scale=0.4`: one value of the spec replaced by its path, before anything is checked."""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from typing import Any

from merging.errors import Problem, SpecError
from merging.spec.text import json_value, plain
from merging.spec.wording import described, join, shortened

_STEP = r"""(?:"[^"]*"|'[^']*'|[^."'=]+)"""
_ASSIGNMENT = re.compile(rf"({_STEP}(?:\.{_STEP})*)=(.*)", re.DOTALL)


def overridden(raw: dict[str, Any], sets: Sequence[str]) -> dict[str, Any]:
    """A copy of `raw` with each `path=value` put in. Raises SpecError with all that cannot be."""
    raw, problems = copy.deepcopy(raw), []
    for text in sets:
        try:
            steps, value = parse_set(text)
            put_(raw, steps, value)
        except ValueError as error:
            problems.append(Problem(f"--set {shortened(text)}", str(error)))
    if problems:
        raise SpecError("what --set asks for cannot be set", problems=problems)
    return plain(raw, "--set") if sets else raw


def parse_set(text: str) -> tuple[list[str], Any]:
    """`experts."a.b".weight=2` -> (["experts", "a.b", "weight"], 2). A value that is not JSON is text."""
    match = _ASSIGNMENT.fullmatch(text)
    if match is None:
        raise ValueError("expected PATH=VALUE, such as merge.scale=0.4")
    steps = [step.strip("\"'") for step in re.findall(_STEP, match[1])]
    try:
        return steps, json_value(match[2], for_plain=True)
    except (ValueError, RecursionError):
        return steps, match[2]


def put_(raw: dict[str, Any], steps: Sequence[str], value: object) -> None:
    """Set one value inside `raw`. Raises ValueError where the path leads into a plain value."""
    target: Any = raw
    for depth, step in enumerate(steps):
        last = depth == len(steps) - 1
        if isinstance(target, list):
            position = _position(target, step, steps[:depth])
            if last:
                target[position] = value
            else:
                target[position] = target = _opened(target[position], steps[: depth + 1])
        elif last:
            target[step] = value
        else:
            target[step] = target = _opened(target.get(step), steps[: depth + 1])


def _position(target: list[Any], step: str, steps: Sequence[str]) -> int:
    if not re.fullmatch(r"[0-9]{1,9}", step) or int(step) >= len(target):
        valid = f"0 to {len(target) - 1}" if target else "none, it is empty"
        place, asked = shortened(join("", *steps)), shortened(step)
        raise ValueError(f'"{place}" is a list; "{asked}" is not a position in it ({valid})')
    return int(step)


def _opened(value: object, steps: Sequence[str]) -> Any:
    """What a further step may go into; where a text stands for an object, that object."""
    if value is None:
        return {}
    if isinstance(value, dict | list):
        return value
    if isinstance(value, str) and (list(steps) == ["base"] or (len(steps) == 2 and steps[0] == "experts")):
        return {"model": value}
    if isinstance(value, str) and steps[0] in ("merge", "backbone", "calibrate"):
        return {"type": value}
    raise ValueError(f'"{shortened(join("", *steps))}" is {described(value)}, nothing can be set inside it')
