"""Classes: from a column of labels to class indices, and the answers that stand for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from merging.data.rows import Row, refuse_bad_rows
from merging.errors import Problem


class Classes(NamedTuple):
    """Class index of every row; names and answers by class, where they are known."""

    labels: tuple[int, ...]
    names: tuple[str, ...] = ()
    answers: tuple[tuple[str, ...], ...] = ()


def read_classes(
    rows: Sequence[Row],
    column: str,
    labels: Mapping[str, str | tuple[str, ...]] | tuple[str, ...] | None,
    where: str,
) -> Classes:
    """With `labels`, classes are numbered as they are listed there; without, numbers are taken as they are,
    and names by their place among the sorted names. Raises DataError for rows of no class."""
    answers = _answers(labels)
    names = tuple(labels) if isinstance(labels, Mapping) else tuple(map(str, range(len(answers))))
    found = [_name(row.values.get(column)) for row in rows]
    problems = [
        Problem(row.where, f'column "{column}" is {_kind(row.values.get(column))}, expected a class')
        for row, name in zip(rows, found, strict=True)
        if name is None
    ]
    if labels is None and not problems:
        known = [str(name) for name in found]
        if all(name.isdecimal() for name in known):
            return Classes(tuple(map(int, known)))
        names = tuple(sorted(set(known)))
    numbers = {name: number for number, name in enumerate(names)}
    if isinstance(labels, tuple):  # the column may hold the answers themselves
        numbers = {answer.strip(): number for number, answer in enumerate(labels)} | numbers
    problems += [
        Problem(row.where, f'column "{column}" is "{name}", which is not one of {", ".join(names)}')
        for row, name in zip(rows, found, strict=True)
        if name is not None and name not in numbers
    ]
    refuse_bad_rows(problems, where, len(rows))
    return Classes(tuple(numbers[str(name)] for name in found), names, answers)


def _answers(
    labels: Mapping[str, str | tuple[str, ...]] | tuple[str, ...] | None,
) -> tuple[tuple[str, ...], ...]:
    values = labels.values() if isinstance(labels, Mapping) else labels or ()
    return tuple((value,) if isinstance(value, str) else tuple(value) for value in values)


def _name(value: Any) -> str | None:
    """A class as JSON or a spec's key writes it: 1, "1" and 1.0 are the same, as are true and "true"."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    if isinstance(value, int | str) and str(value).strip():
        return str(value).strip()
    return None


def _kind(value: Any) -> str:
    return "missing or empty" if value is None or value == "" else f"a {type(value).__name__}"
