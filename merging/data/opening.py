"""open_examples: from what the spec says of a data source to the examples themselves."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias

from merging.errors import DataError

if TYPE_CHECKING:
    from merging.data.images import Listing
    from merging.data.rows import Row
    from merging.data.spec import DataSpec
    from merging.data.task import Examples
    from merging.data.text_spec import DatasetData, TextData


Purpose: TypeAlias = Literal["calibration", "validation", "test"]


def open_examples(
    spec: DataSpec,
    *,
    task: str,
    purpose: Purpose,
    base_folder: Path | None,
    seed: int,
    labelled: bool = True,
) -> Examples:
    """Examples, checked; `labelled`: those to test on need a class each. `base_folder` is where the base's
    processor or tokenizer lies; paths are used as they are.

    Every run with this spec, task and seed gets the same examples in the same order. Their `notes` say what
    the report should warn of: fewer examples than asked for, repeated examples.
    """
    where = f'task "{task}": {purpose} data'
    examples = _opened(spec, where, task, base_folder, seed)
    examples.automatic = spec.batch_size is None
    if examples.automatic and spec.type not in ("text", "dataset") and len(examples):
        examples.batch_size = 1
        first = sum(value.nbytes for value in examples.batches()[0].values())
        examples.batch_size = _FEW if first >= _LARGE else _MANY
    if labelled and purpose != "calibration":
        _check_labels(examples, where, column=spec.type in ("text", "dataset"))
    examples.notes += _remarks(examples, where)
    return examples


def open_spare(
    spec: DataSpec, *, task: str, base_folder: Path | None, seed: int, count: int
) -> Examples | None:
    """The first `count` examples that the calibration does not draw, in the order in which it would; None if
    it draws all."""
    if spec.examples is None:
        return None
    where = f'task "{task}": spare calibration data'
    rest = spec.model_copy(update={"examples": count})
    examples = _opened(rest, where, task, base_folder, seed, skip=spec.examples)
    return examples if len(examples) else None


def _opened(
    spec: DataSpec, where: str, task: str, base_folder: Path | None, seed: int, *, skip: int = 0
) -> Examples:
    if spec.type == "tensors":
        from merging.data.tensors import TensorExamples

        return TensorExamples(
            Path(spec.path), where=where, asked=spec.examples, skip=skip, batch_size=_batch_size(spec)
        )
    if base_folder is None or not base_folder.is_dir():
        raise DataError(
            f'{where}: "{spec.type}" needs the folder of the base, for its processor or tokenizer',
            remedy='Give the base as a folder, or processed inputs: {"type": "tensors"}.',
        )
    if spec.type == "text":
        from merging.data.rows import read_rows

        return _text(spec, read_rows(Path(spec.path), where), where, task, base_folder, seed, skip)
    source: Path | Listing
    if spec.type == "dataset":
        from merging.data.hugging_face import pictures, text_rows

        if spec.image is None:
            return _text(spec, text_rows(spec, where), where, task, base_folder, seed, skip)
        source = pictures(spec, where)
    else:
        source = Path(spec.path)
    from merging.data.images import ImageExamples, image_processor

    return ImageExamples(
        source,
        where=where,
        task=task,
        processor=image_processor(base_folder, where),
        seed=seed,
        asked=spec.examples,
        skip=skip,
        batch_size=_batch_size(spec),
    )


def _text(
    spec: TextData | DatasetData,
    rows: list[Row],
    where: str,
    task: str,
    base_folder: Path,
    seed: int,
    skip: int,
) -> Examples:
    from merging.data.text import TextExamples
    from merging.data.tokenizer import text_reader

    reader = text_reader(base_folder, where)
    asked, size = spec.examples, _batch_size(spec)
    return TextExamples(
        rows, spec, reader, where=where, task=task, seed=seed, asked=asked, skip=skip, batch_size=size
    )


def _batch_size(spec: DataSpec) -> int:
    """As asked for; if nothing is, fewer of texts, which may be long."""
    return spec.batch_size or (_FEW if spec.type in ("text", "dataset") else _MANY)


_FEW, _MANY = (
    16,
    32,
)  # examples in a batch: the few of long texts and large pictures are as fast, in less memory
_LARGE = 256 << 10  # bytes of an example


def _check_labels(examples: Examples, where: str, *, column: bool) -> None:
    labels = examples.labels
    if labels is None:
        raise DataError(
            f'{where} has no "labels"',
            remedy='Name the column of classes: "label": "label".'
            if column
            else 'Add a tensor "labels" of class indices, one per example.',
        )
    if labels.ndim != 1 or labels.is_floating_point() or labels.is_complex():
        raise DataError(
            f'{where}: "labels" is {tuple(labels.shape)} of {labels.dtype}, '
            "expected one class index per example"
        )


def _remarks(examples: Examples, where: str) -> tuple[str, ...]:
    remarks = []
    if examples.asked is not None and len(examples) < examples.asked:
        remarks.append(
            f"{where}: {examples.asked} examples asked for, {len(examples)} used: there are no more"
        )
    repeated = len(examples) - len(set(examples.hashes()))
    if repeated:
        remarks.append(f"{where}: {repeated} of {len(examples)} examples repeat another one")
    return tuple(remarks)
