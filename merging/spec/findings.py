"""Findings: all problems of a spec, gathered while it is read, each with its JSON path and a remedy."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails, PydanticCustomError

from merging.errors import Problem
from merging.registry import did_you_mean
from merging.spec.unknown_keys import Places, UnknownKey
from merging.spec.wording import described, join, shortened

_LONGEST_PATH = 200  # characters of a JSON path in a message

_EXPECTED = {
    "float_type": "a number",
    "int_type": "a whole number",
    "bool_type": "true or false",
    "string_type": "text",
    "path_type": "text",
    "list_type": "a list",
    "tuple_type": "a list",
    "dict_type": "an object",
    "model_type": "an object",
    "finite_number": "a finite number",
    "greater_than": "more than {gt}",
    "greater_than_equal": "at least {ge}",
    "less_than": "less than {lt}",
    "less_than_equal": "at most {le}",
    "string_too_short": "some text",
}


def refuse(what: str, remedy: str = "") -> NoReturn:
    """For validators: becomes a Problem with these words at the value's place."""
    raise PydanticCustomError("refused", "{what}", {"what": what, "remedy": remedy})


class Findings:
    """Gathers. Remedies are made when `problems` is called: those for unknown keys need the whole spec."""

    def __init__(self) -> None:
        self._found: list[Problem | UnknownKey] = []
        self._places = Places()

    def __bool__(self) -> bool:
        return bool(self._found)

    def __len__(self) -> int:
        return len(self._found)

    def add(self, where: str, what: str, remedy: str = "") -> None:
        self._found.append(Problem(where, what, remedy))

    def problems(self) -> tuple[Problem, ...]:
        problems = (
            self._places.explain(found) if isinstance(found, UnknownKey) else found for found in self._found
        )
        return tuple(
            problem._replace(where=shortened(problem.where, _LONGEST_PATH))
            if len(problem.where) > _LONGEST_PATH
            else problem
            for problem in problems
        )

    def keys(self, where: str, model: type[BaseModel], *others: str) -> None:
        """These keys are valid at that place; remedies elsewhere may point here."""
        fields = {key: field.description or "" for key, field in model.model_fields.items()}
        self._places.add(where, {**dict.fromkeys(others, ""), **fields})

    def unknown(self, where: str, key: str, value: object) -> None:
        self._found.append(UnknownKey(where, key, value))

    def read(self, kind: Any, value: object, where: str) -> Any:
        """The value as a `kind` (a model or any annotated type), or None when something was wrong with it.

        Checked as JSON, strictly: a number in quotes is text.
        """
        is_model = isinstance(kind, type) and issubclass(kind, BaseModel)
        if is_model:
            self.keys(where, kind)
        try:
            text = json.dumps(value)
        except (TypeError, ValueError, RecursionError):
            self._add_foreign(value, where)
            return None
        try:
            return TypeAdapter(kind).validate_json(text, strict=True)
        except ValidationError as error:
            fields: Mapping[str, Any] = kind.model_fields if is_model else {}
            self._add_errors(error.errors(include_url=False), value, where, fields)
            return None

    def _add_foreign(self, value: object, where: str) -> None:
        """Say which part of the value JSON does not have."""
        parts = value.items() if isinstance(value, Mapping) else ()
        strange = {join(where, key): item for key, item in parts if not _is_json(item)} or {where: value}
        for place, item in strange.items():
            inside = "something in it that is " if isinstance(item, Mapping | list | tuple) else ""
            self.add(
                place, f"found {described(item)}, {inside}not a number, text, true, false, list or object"
            )

    def _add_errors(
        self, errors: Iterable[ErrorDetails], value: object, where: str, fields: Mapping[str, Any]
    ) -> None:
        places: dict[tuple[object, ...], list[ErrorDetails]] = {}
        for error in errors:
            places.setdefault(_location(error, value), []).append(error)
        for location, found in places.items():
            kind = found[0]["type"]
            if kind == "extra_forbidden":
                self.unknown(join(where, *location[:-1]), str(location[-1]), found[0]["input"])
                continue
            field = fields.get(str(location[0])) if location else None
            about = (field.description or "") if field is not None else ""
            if kind == "missing":
                self.add(join(where, *location), "missing", about)
            elif kind == "refused":
                context = found[0]["ctx"]
                self.add(join(where, *location), context["what"], context["remedy"])
            else:
                expected = " or ".join(dict.fromkeys(_expected(error) for error in found))
                what = f"found {described(found[0]['input'])}, expected {expected}"
                self.add(join(where, *location), what, _choice(found) or about)


def told(error: ValidationError, values: Mapping[str, Any], model: type[BaseModel]) -> tuple[Problem, ...]:
    """What pydantic found wrong with these values of a model, in our words."""
    findings = Findings()
    findings.keys("", model)
    findings._add_errors(error.errors(include_url=False), values, "", model.model_fields)
    return findings.problems()


def _location(error: ErrorDetails, value: object) -> tuple[object, ...]:
    """The part of pydantic's location that lies in the value; the rest names branches of unions."""
    location: list[object] = []
    for step in error["loc"]:
        if isinstance(value, Mapping) and (step in value or error["type"] == "missing"):
            value = value.get(step)
        elif isinstance(value, list) and isinstance(step, int) and step < len(value):
            value = value[step]
        else:
            break
        location.append(step)
    return tuple(location)


def _expected(error: ErrorDetails) -> str:
    context = error.get("ctx", {})
    if error["type"] in ("literal_error", "enum"):
        return str(context["expected"]).replace("'", '"')
    if error["type"] in _EXPECTED:
        return _EXPECTED[error["type"]].format(
            **{key: f"{bound:g}" if isinstance(bound, float) else bound for key, bound in context.items()}
        )
    return error["msg"].removeprefix("Input should be ").removeprefix("Value error, ")


def _choice(errors: list[ErrorDetails]) -> str:
    valid = [
        word
        for error in errors
        if error["type"] in ("literal_error", "enum")
        for word in re.findall(r"'([^']*)'", str(error.get("ctx", {}).get("expected")))
    ]
    value = errors[0]["input"]
    return did_you_mean(value, valid) if len(valid) > 1 and isinstance(value, str) else ""


def _is_json(value: object) -> bool:
    try:
        json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        return False
    return True
