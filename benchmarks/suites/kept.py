"""Examples that are read once and then kept in memory: a grid goes over them a hundred times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

from torch import Tensor

from merging.contracts.backbone import Batch
from merging.data.task import Examples, Task
from merging.data.text import TextExamples


class Kept(Examples):
    """The same examples as the given ones, in the same batches."""

    def __init__(self, examples: Examples, batch_size: int) -> None:
        examples.batch_size = batch_size
        self._examples = examples
        self.asked, self.notes, self.batch_size = examples.asked, examples.notes, batch_size

    def __len__(self) -> int:
        return len(self._examples)

    def batches(self) -> Sequence[Batch]:
        return self._batches

    @cached_property
    def _batches(self) -> Sequence[Batch]:
        return list(self._examples.batches())

    @property
    def labels(self) -> Tensor | None:
        return self._examples.labels

    @property
    def fingerprint(self) -> str:
        return self._examples.fingerprint

    def hashes(self) -> tuple[str, ...]:
        return self._examples.hashes()


def kept(task: Task, batch_size: int) -> Task:
    """The task with all its examples kept. Texts are in memory as they are, and metrics ask them for more."""

    def keep(examples: Examples | None) -> Examples | None:
        if isinstance(examples, TextExamples):
            examples.batch_size = batch_size
            return examples
        return None if examples is None else Kept(examples, batch_size)

    return replace(
        task, calibration=keep(task.calibration), test=keep(task.test), validation=keep(task.validation)
    )
