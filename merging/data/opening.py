"""open_examples: from what the spec says of a data source to the examples themselves."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias

from merging.errors import DataError

if TYPE_CHECKING:
    from merging.data.spec import ImagesData, TensorsData
    from merging.data.task import Examples


Purpose: TypeAlias = Literal["calibration", "validation", "test"]


def open_examples(
    spec: TensorsData | ImagesData,
    *,
    task: str,
    purpose: Purpose,
    base_folder: Path | None,
    seed: int,
) -> Examples:
    """Examples, checked. `base_folder` is where the base's processor lies; paths are used as they are.

    Every run with this spec, task and seed gets the same examples in the same order. Their `notes` say what
    the report should warn of: fewer examples than asked for, repeated examples.
    """
    where = f'task "{task}": {purpose} data'
    examples = _opened(spec, where, task, base_folder, seed)
    if purpose != "calibration":
        _check_labels(examples, where)
    examples.notes += _remarks(examples, where)
    return examples


def _opened(
    spec: TensorsData | ImagesData, where: str, task: str, base_folder: Path | None, seed: int
) -> Examples:
    if spec.type == "tensors":
        from merging.data.tensors import TensorExamples

        return TensorExamples(Path(spec.path), where=where, asked=spec.examples, batch_size=spec.batch_size)
    from merging.data.images import ImageExamples, image_processor

    if base_folder is None:
        raise DataError(
            f"{where}: images need the folder of the base, for its image processor",
            remedy='Give the base as a folder, or processed inputs: {"type": "tensors"}.',
        )
    return ImageExamples(
        Path(spec.path),
        where=where,
        task=task,
        processor=image_processor(base_folder, where),
        seed=seed,
        asked=spec.examples,
        batch_size=spec.batch_size,
    )


def _check_labels(examples: Examples, where: str) -> None:
    labels = examples.labels
    if labels is None:
        raise DataError(
            f'{where} has no "labels"', remedy='Add a tensor "labels" of class indices, one per example.'
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
