"""read_rows: rows of JSON lines, CSV or parquet, each with its place in the file."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from merging.errors import DataError, Problem
from merging.registry import did_you_mean
from merging.spec.text import json_value

_LONGEST_CELL = 2**31 - 1  # characters; Python's own limit of 131072 is less than an article may have
SHOWN = 10  # problems of one file; the others are counted


class Row(NamedTuple):
    """Column -> value, and where it lies: `train.jsonl:17`."""

    where: str
    values: Mapping[str, Any]


def read_rows(path: Path, where: str) -> list[Row]:
    """All rows. Raises DataError that names file and line; `where` starts it: 'task "mnli": test data'."""
    if not path.is_file():
        kind = "is a folder, expected a file" if path.is_dir() else "does not exist"
        raise DataError(f"{where}: {path} {kind}")
    reader = _READERS.get(path.suffix.lower())
    if reader is None:
        raise DataError(
            f'{where}: {path} ends in "{path.suffix}", expected one of {", ".join(_READERS)}',
            remedy="Store it as JSON lines: one object per line, in UTF-8.",
        )
    problems: list[Problem] = []
    rows = list(reader(path, where, problems))
    refuse_bad_rows(problems, where, len(rows) + len(problems))
    if not rows:
        raise DataError(f"{where}: {path} is empty")
    return rows


def refuse_bad_rows(problems: list[Problem], where: str, rows: int) -> None:
    """Raise a DataError with the first of them, if there are any."""
    if problems:
        raise DataError(
            f"{where}: {len(problems)} of {rows} rows cannot be used",
            problems=problems[:SHOWN],
            remedy="Mend or remove these rows.",
        )


def no_number(value: float) -> str:
    """NaN and infinity, as a message calls them."""
    return "NaN" if math.isnan(value) else "infinite"


def refuse_missing_columns(rows: list[Row], columns: tuple[str, ...], where: str) -> None:
    """Raise a DataError for columns that no row has."""
    found = dict.fromkeys(name for row in rows for name in row.values)
    missing = [column for column in columns if column not in found]
    if missing:
        names = ", ".join(f'"{name}"' for name in missing)
        file = rows[0].where.rpartition(":")[0]
        raise DataError(
            f"{where}: {file} has no column {names}; it has {', '.join(map(str, found))}",
            remedy=did_you_mean(missing[0], map(str, found)),
        )


def _json_lines(path: Path, where: str, problems: list[Problem]) -> Iterator[Row]:
    text = _text(path, where)
    if text.lstrip().startswith("["):
        raise DataError(
            f"{where}: {path} is one JSON list, expected JSON lines", remedy="Write one object per line."
        )
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        place = f"{path}:{number}"
        try:
            value = json_value(line, constant=float)  # told where a column that is read holds it
        except json.JSONDecodeError as error:
            problems.append(Problem(place, f"is not JSON ({error.msg} at column {error.colno})"))
            continue
        except (ValueError, RecursionError) as error:
            problems.append(Problem(place, f"cannot be read ({error})"))
            continue
        if not isinstance(value, dict):
            kind = type(value).__name__
            problems.append(Problem(place, f"is a {kind}, expected one object per line"))
            continue
        yield Row(place, value)


def _csv(path: Path, where: str, problems: list[Problem]) -> Iterator[Row]:
    csv.field_size_limit(_LONGEST_CELL)
    lines = io.StringIO(_text(path, where), newline="")
    reader = csv.reader(lines, delimiter="\t" if path.suffix.lower() == ".tsv" else ",", strict=True)
    try:
        header = next(reader, None)
        if header is None:
            return
        if twice := sorted({name for name in header if name and header.count(name) > 1}):
            names = ", ".join(f'"{name}"' for name in twice)
            raise DataError(f"{where}: {path} has two columns of one name: {names}", remedy="Rename one.")
        last = reader.line_num
        for cells in reader:
            place, last = f"{path}:{last + 1}", reader.line_num
            if not cells:
                continue
            if len(cells) != len(header):
                problems.append(Problem(place, f"has {len(cells)} cells, the header has {len(header)}"))
                continue
            yield Row(place, dict(zip(header, cells, strict=True)))
    except csv.Error as error:
        problems.append(Problem(f"{path}:{reader.line_num}", f"is not CSV ({error})"))


def _parquet(path: Path, where: str, problems: list[Problem]) -> Iterator[Row]:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError as error:
        raise DataError(
            f"{where}: {path} is parquet, which needs pyarrow", remedy="pip install 'merging[data]'"
        ) from error
    try:
        table = parquet.read_table(path)
    except (ArrowException, OSError) as error:
        raise DataError(f"{where}: {path} is not a whole parquet file ({error})") from error
    for number, values in enumerate(table.to_pylist(), start=1):
        yield Row(f"{path}:{number}", values)


def _text(path: Path, where: str) -> str:
    content = path.read_bytes()
    try:
        return content.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise DataError(
            f"{where}: {path}:{line} is not UTF-8 (byte 0x{content[error.start]:02x})",
            remedy="Store the file as UTF-8.",
        ) from error


_READERS: dict[str, Callable[[Path, str, list[Problem]], Iterator[Row]]] = {
    ".jsonl": _json_lines,
    ".json": _json_lines,
    ".ndjson": _json_lines,
    ".csv": _csv,
    ".tsv": _csv,
    ".parquet": _parquet,
}
