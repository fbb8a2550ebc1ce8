"""From a spec's file to plain JSON values: JSON and YAML, with line and column where the text is wrong."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml

from merging.errors import MergingError, SpecError
from merging.registry import nearest
from merging.spec.wording import described, join, shortened

MAX_BYTES = 1 << 20
MAX_DEPTH = 40
MAX_VALUES = 100_000
_MOST_DIGITS = 1000


def read_text(path: Path) -> str:
    """The file's text. Raises SpecError for what is missing, a folder, too large or not text."""
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        raise _unreadable(path, error) from None
    if len(content) > MAX_BYTES:
        raise SpecError(
            f"{path} is larger than {MAX_BYTES >> 20} MiB: too large for a spec",
            remedy="Is it a checkpoint or a data file? The spec is a small JSON or YAML file.",
        )
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise SpecError(f"{path} is not UTF-8 text: byte {error.start} cannot be read") from None


def _unreadable(path: Path, error: OSError | ValueError) -> SpecError:
    if isinstance(error, FileNotFoundError):
        return SpecError(f"there is no file {path}", remedy=_sibling(path))
    if isinstance(error, IsADirectoryError):
        specs = sorted(file.name for file in path.iterdir() if file.suffix in (".json", ".yaml", ".yml"))
        remedy = f"Give the file in it: {', '.join(specs[:5])}" if specs else "Give the JSON or YAML file."
        return SpecError(f"{path} is a folder, expected the spec's file", remedy=remedy)
    reason = error.strerror if isinstance(error, OSError) else error
    return SpecError(f"{shortened(str(path))} cannot be read: {reason}")


def _sibling(path: Path) -> str:
    try:
        guess = nearest(path.name, os.listdir(path.parent))
    except OSError:
        return f"There is no folder {path.parent} either."
    return f'did you mean "{path.with_name(guess)}"?' if guess else ""


def parse_text(text: str, label: str, *, yaml_syntax: bool) -> dict[str, Any]:
    """The object in the text. Raises SpecError with `label`, line and column."""
    if not text.strip():
        raise SpecError(f"{label} is empty", remedy='Expected an object: {"base": ..., "merge": ...}.')
    try:
        value = yaml.load(text, _Loader) if yaml_syntax else _loaded_json(text, label)
    except yaml.YAMLError as error:
        raise _yaml_error(error, label) from None
    except RecursionError:
        raise SpecError(f"{label} is nested too deeply") from None
    except MergingError:
        raise
    except Exception as error:  # PyYAML lets through whatever int(), float() and the like raise
        raise SpecError(f"{label}: {shortened(str(error))}") from None
    if value is None and yaml_syntax:
        raise SpecError(f"{label} holds nothing but comments or null", remedy="Expected an object.")
    if not isinstance(value, dict):
        found = described(value) if _is_plain(value) else f"a {type(value).__name__}"
        raise SpecError(
            f"{label}: found {found} at the top, expected an object",
            remedy='Like {"base": ..., "experts": {...}, "merge": {...}}.',
        )
    return plain(value, label)


def plain(value: Mapping[Any, Any], label: str) -> dict[str, Any]:
    """The same in dicts, lists, texts and finite numbers only. Raises SpecError for anything else."""
    count = 0

    def visit(value: object, where: str, depth: int) -> Any:
        nonlocal count
        count += 1
        if depth > MAX_DEPTH or count > MAX_VALUES:
            kind = "nested too deeply" if depth > MAX_DEPTH else "too large: anchors may have blown it up"
            raise SpecError(f"{label} is {kind}")
        if isinstance(value, Mapping):
            for key in value:
                if not isinstance(key, str):
                    found = described(key) if _is_plain(key) else f"a {type(key).__name__}"
                    raise SpecError(f"{label}: {where or 'top level'}: {found} as a key", remedy="Quote it.")
                _check_characters(key, where, label)
            return {key: visit(item, join(where, key), depth + 1) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [visit(item, join(where, index), depth + 1) for index, item in enumerate(value)]
        if isinstance(value, os.PathLike):
            value = os.fspath(value)
        if isinstance(value, str):
            _check_characters(value, where, label)
            return str(value)
        if isinstance(value, float) and not math.isfinite(value):
            raise SpecError(f"{label}: {where}: found {json.dumps(value)}, expected a finite number")
        if isinstance(value, _LongNumber):
            raise SpecError(
                f"{label}: {where or 'top level'}: found a number of {value.digits} digits, expected one of "
                f"at most {_MOST_DIGITS}"
            )
        if not _is_plain(value):
            raise SpecError(f"{label}: {where}: found a {type(value).__name__}, expected a JSON value")
        return value

    return visit(value, "", 0)


def _is_plain(value: object) -> bool:
    return value is None or isinstance(value, bool | int | float | str | list | dict)


def _check_characters(text: str, where: str, label: str) -> None:
    if "\0" in text or any("\ud800" <= character <= "\udfff" for character in text):
        raise SpecError(f'{label}: {where or "top level"}: "{shortened(text)}" is not proper text')


def _refuse_constant(text: str) -> float:
    raise ValueError(f"{text} is not a number that JSON may hold")


def json_value(
    text: str, *, for_plain: bool = False, constant: Callable[[str], float] = _refuse_constant
) -> Any:
    """A JSON value. Raises ValueError for bad syntax, keys given twice, NaN and infinity. `for_plain`:
    numbers that are too long are left to `plain`, which knows their place.
    `constant`: what becomes of NaN and infinity."""
    return json.loads(
        text,
        object_pairs_hook=_without_duplicates,
        parse_constant=constant,
        parse_int=_whole if for_plain else int,
    )


class _LongNumber:
    """Stands for a number that has too many digits, until it is known where it stands."""

    def __init__(self, digits: int) -> None:
        self.digits = digits


def _whole(text: str) -> int | _LongNumber:
    digits = len(text.lstrip("-"))
    return int(text) if digits <= _MOST_DIGITS else _LongNumber(digits)


def _loaded_json(text: str, label: str) -> Any:
    try:
        return json_value(text, for_plain=True, constant=float)  # `plain` says where they stand
    except json.JSONDecodeError as error:
        what = error.msg[0].lower() + error.msg[1:]
        before = text[: error.pos].rstrip()
        if "trailing comma" in what or (
            before.endswith(",") and text[error.pos : error.pos + 1] in ("}", "]")
        ):
            what = "a comma before the closing bracket"
        elif before.endswith(",") is False and text[error.pos : error.pos + 1] == '"' and "delimiter" in what:
            what += " (is one missing at the end of the line before?)"
        remedy = "" if text.lstrip()[:1] in "{[" else "Is it YAML? Then its name has to end in .yaml."
        where = f"{label}, line {error.lineno}, column {error.colno}"
        raise SpecError(f"{where}: {what}", remedy=remedy) from None


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f'the key "{shortened(key)}" is given twice in one object')
        found[key] = value
    return found


class _Loader(yaml.SafeLoader):
    """Safe YAML where `1e-3` is a number, dates are text, and a key given twice is an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen and key.value != "<<":
                    raise yaml.constructor.ConstructorError(
                        None, None, f'the key "{shortened(key.value)}" is given twice', key.start_mark
                    )
                seen.add(key.value)
        return super().construct_mapping(node, deep)

    def construct_yaml_int(self, node: yaml.ScalarNode) -> Any:
        digits = sum(character.isalnum() for character in node.value)
        return super().construct_yaml_int(node) if digits <= _MOST_DIGITS else _LongNumber(digits)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)[eE][-+]?[0-9]+$"),
    list("-+0123456789."),
)
_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_yaml_int)
_Loader.add_constructor("tag:yaml.org,2002:timestamp", lambda loader, node: str(node.value))


def _yaml_error(error: yaml.YAMLError, label: str) -> SpecError:
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        mark = error.problem_mark
        return SpecError(f"{label}, line {mark.line + 1}, column {mark.column + 1}: {error.problem}")
    return SpecError(f"{label}: {shortened(' '.join(str(error).split()), 160)}")
