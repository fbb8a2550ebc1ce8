"""Data sets of the `datasets` library: from a folder, a file or the hub to rows of text or pictures."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from PIL.Image import Image

from merging.data.classes import read_classes
from merging.data.images import Listing, decoded
from merging.data.prompts import Template
from merging.data.rows import Row, refuse_missing_columns
from merging.data.text_spec import DatasetData
from merging.errors import DataError
from merging.registry import did_you_mean

_SAVED = ("dataset_dict.json", "state.json")  # what save_to_disk leaves
_BUILDERS = {".parquet": "parquet", ".csv": "csv", ".tsv": "csv", ".jsonl": "json", ".json": "json"}


def open_split(spec: DatasetData, where: str) -> Any:
    """One split of the data set. Raises DataError where it cannot be had, with the splits that there are."""
    try:
        import datasets
    except ImportError as error:
        raise DataError(
            f'{where}: "dataset" needs the datasets library', remedy="pip install 'merging[data]'"
        ) from error
    try:
        found = _loaded(datasets, spec)
    except (OSError, ValueError, RuntimeError, ImportError, datasets.exceptions.DatasetsError) as error:
        local = Path(spec.path).exists()
        remedy = (
            "Give a folder that save_to_disk wrote, or parquet, CSV or JSON lines."
            if local
            else "Check name and network; offline it must be in the cache, or be given as a folder."
        )
        broken = isinstance(error, datasets.exceptions.DatasetGenerationError)  # says nothing itself
        told = str(error.__cause__ if broken and error.__cause__ else error).strip().splitlines()
        what = told[0] if told else type(error).__name__
        raise DataError(f'{where}: data set "{spec.path}" cannot be opened: {what}', remedy=remedy) from error
    if not isinstance(found, Mapping):
        if spec.split is not None and str(found.split) not in (spec.split, "None"):
            raise DataError(f'{where}: "{spec.path}" is the split "{found.split}", not "{spec.split}"')
        return found
    if spec.split is None and len(found) == 1:
        return next(iter(found.values()))
    if spec.split not in found:
        asked = f'has no split "{spec.split}"' if spec.split is not None else "has several splits"
        raise DataError(
            f'{where}: data set "{spec.path}" {asked}; there are: {", ".join(found)}',
            remedy=did_you_mean(spec.split, found) if spec.split else 'Give one: "split": "train".',
        )
    return found[spec.split]


def text_rows(spec: DatasetData, where: str) -> list[Row]:
    """The columns that are read, of all rows; classes by name where `labels` names them so."""
    split = open_split(spec, where)
    wanted = (*Template(spec.template).columns, *filter(None, (spec.target, spec.label)))
    _refuse_missing(split, wanted, spec, where)
    columns = {column: split[column][:] for column in dict.fromkeys(wanted)}
    if spec.label is not None and spec.labels is not None:
        columns[spec.label] = _named(split, spec.label, columns[spec.label], spec.labels)
    return [
        Row(_place(spec, number), dict(zip(columns, values, strict=True)))
        for number, values in enumerate(zip(*columns.values(), strict=True))
    ]


class Picture(NamedTuple):
    """A row's picture, not decoded."""

    where: str
    read: Callable[[], bytes]

    def __str__(self) -> str:
        return self.where

    def decoded(self) -> Image:
        return decoded(io.BytesIO(self.read()))


def pictures(spec: DatasetData, where: str) -> Listing:
    """Pictures by class; one class without a name where there is no column of classes."""
    import datasets

    assert spec.image is not None
    split = open_split(spec, where)
    wanted = (spec.image, *filter(None, (spec.label,)))
    _refuse_missing(split, wanted, spec, where)
    if not isinstance(split.features[spec.image], datasets.Image):
        kind = type(split.features[spec.image]).__name__
        raise DataError(f'{where}: column "{spec.image}" is {kind}, expected pictures')
    raw = split.cast_column(spec.image, datasets.Image(decode=False))
    everything = [Picture(_place(spec, row), _reading(raw, spec.image, row)) for row in range(len(raw))]
    if spec.label is None:
        return Listing((), [everything], ())
    labels = split[spec.label][:]
    if spec.labels is not None:
        labels = _named(split, spec.label, labels, spec.labels)
    rows = [
        Row(picture.where, {spec.label: label}) for picture, label in zip(everything, labels, strict=True)
    ]
    classes = read_classes(rows, spec.label, spec.labels, where)
    count = max(len(classes.names), max(classes.labels, default=-1) + 1)
    names = classes.names or _own_names(split, spec.label, count) or tuple(map(str, range(count)))
    members: list[list[Any]] = [[] for _ in names]
    for picture, label in zip(everything, classes.labels, strict=True):
        members[label].append(picture)
    return Listing(names, members, (), found=spec.labels is None and bool(classes.names))


def _loaded(datasets: Any, spec: DatasetData) -> Any:
    path = Path(spec.path)
    if path.is_file():
        kind = _BUILDERS.get(path.suffix.lower())
        if kind is None:
            raise ValueError(f'a file that ends in "{path.suffix}" is none of {", ".join(_BUILDERS)}')
        extra = {"sep": "\t"} if path.suffix.lower() == ".tsv" else {}
        return datasets.load_dataset(kind, data_files=str(path), **extra)
    if any((path / name).is_file() for name in _SAVED):
        return datasets.load_from_disk(str(path))
    return datasets.load_dataset(spec.path, spec.config, revision=spec.revision)


def _refuse_missing(split: Any, wanted: tuple[str, ...], spec: DatasetData, where: str) -> None:
    if not len(split):
        raise DataError(f'{where}: data set "{spec.path}" is empty')
    header = dict.fromkeys(split.column_names)
    refuse_missing_columns([Row(_place(spec, 0), header)], wanted, where)


def _own_names(split: Any, column: str, count: int) -> tuple[str, ...]:
    """What the data set calls its classes, where it names them all."""
    names = getattr(split.features[column], "names", None) or ()
    return tuple(map(str, names)) if len(names) >= count else ()


def _named(
    split: Any, column: str, values: list[Any], labels: Mapping[str, Any] | tuple[str, ...]
) -> list[Any]:
    """Class numbers as the data set calls them, where `labels` does so too; over a list of answers as these,
    for a number that the data set gives is a place in it, whatever the answers look like."""
    names = getattr(split.features[column], "names", None)
    if names and isinstance(labels, tuple) and len({*map(str.strip, labels)} - {""}) == len(labels):
        places = dict(enumerate(labels))
        return [places.get(value, f"class {value}") if isinstance(value, int) else value for value in values]
    if not names or isinstance(labels, tuple) or not set(names) & set(labels):
        return values
    return [names[value] if isinstance(value, int) and 0 <= value < len(names) else value for value in values]


def _reading(raw: Any, column: str, row: int) -> Callable[[], bytes]:
    def read() -> bytes:
        stored = raw[row][column] or {}
        content = stored.get("bytes")
        if content is None and stored.get("path"):
            content = Path(stored["path"]).read_bytes()
        return bytes(content or b"")

    return read


def _place(spec: DatasetData, row: int) -> str:
    return f"{spec.path}:{row}"
