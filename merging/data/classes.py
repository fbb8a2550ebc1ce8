"""Classes: from a column of labels to class indices, and the answers that stand for them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

from merging.data.rows import Row, no_number, refuse_bad_rows
from merging.errors import DataError, Problem

_MOST = 10**6  # classes; a larger number in the column is no class index
_SHOWN = 12  # values in a message


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
    and names by their place among the sorted names.

    Over a list of answers the column may hold these or their places, 0, 1, ...: the answers count where it
    holds nothing else. Raises DataError for rows of no class, and for a column that is neither throughout."""
    answers = _answers(labels)
    names = tuple(labels) if isinstance(labels, Mapping) else tuple(map(str, range(len(answers))))
    found = [_name(row.values.get(column)) for row in rows]
    problems = [
        Problem(row.where, f'column "{column}" is {_kind(row.values.get(column))}, expected a class')
        for row, name in zip(rows, found, strict=True)
        if name is None
    ]
    if labels is None:
        refuse_bad_rows(problems, where, len(rows))  # without all of them the others' classes are not known
        known = [str(name) for name in found]
        if all(name.isdecimal() for name in known):
            problems = [
                Problem(
                    row.where, f'column "{column}" is {_short(name)}, expected a class index below {_MOST}'
                )
                for row, name in zip(rows, known, strict=True)
                if len(name.lstrip("0")) >= len(str(_MOST))
            ]
            refuse_bad_rows(problems, where, len(rows))
            return Classes(tuple(map(int, known)))
        names = tuple(sorted(set(known)))
    numbers = {name: number for number, name in enumerate(names)}
    if isinstance(labels, tuple):  # the column may hold the answers themselves
        by_answer = {answer.strip(): number for number, answer in enumerate(labels)}
        met = list(dict.fromkeys(name for name in found if name is not None))
        answers_met = sum(name in by_answer for name in met)
        either = by_answer | numbers
        if 0 < answers_met < len(met) and all(name in either for name in met):
            _refuse_mixed(met, labels, column, where)
        numbers = by_answer if answers_met == len(met) else either
    problems += [
        Problem(row.where, f'column "{column}" is "{name}", which is not one of {", ".join(names)}')
        for row, name in zip(rows, found, strict=True)
        if name is not None and name not in numbers
    ]
    refuse_bad_rows(problems, where, len(rows))
    return Classes(tuple(numbers[str(name)] for name in found), names, answers)


def _refuse_mixed(met: Iterable[str], labels: tuple[str, ...], column: str, where: str) -> NoReturn:
    answers = {answer.strip() for answer in labels}
    named = [name for name in met if name in answers]
    others = [name for name in met if name not in answers]
    example = ", ".join(f'"{number}": "{answer}"' for number, answer in enumerate(labels[:2]))
    raise DataError(
        f'{where}: column "{column}" has values that are answers in "labels" ({_listed(named)}) and others '
        f"that could only be their places from 0 ({_listed(others)}): which it holds cannot be told",
        remedy='Say what each value stands for, by an object: "labels": {' + example + ", ...}.",
    )


def _listed(names: Sequence[str]) -> str:
    return ", ".join(f'"{name}"' for name in names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")


def _short(name: str) -> str:
    return name if len(name) <= 30 else f"{name[:30]}... ({len(name)} digits)"


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
    if isinstance(value, float) and not math.isfinite(value):
        return no_number(value)
    empty = value is None or (isinstance(value, str) and not value.strip())
    return "missing or empty" if empty else f"a {type(value).__name__}"
