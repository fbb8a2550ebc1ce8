"""TensorExamples: a safetensors file of stacked model inputs.

Shape letters: B examples.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from merging.contracts.backbone import Batch
from merging.data.batching import LazyBatches
from merging.data.hashing import example_hashes, fingerprint, seen_hashes
from merging.data.task import Examples
from merging.data.tensor_file import open_tensor_file
from merging.errors import DataError, Problem

LABELS = "labels"


class TensorExamples(Examples):
    """Inputs as they lie in the file, in order. Opening reads it once, batch by batch; so does each walk.

    Names in the file are the forward's keyword arguments; `labels` is kept apart, never given to the model.
    """

    def __init__(
        self, path: Path, *, where: str, asked: int | None = None, skip: int = 0, batch_size: int = 16
    ) -> None:
        """`where` starts every message: 'task "mnist": test data'. `asked`: the first so many examples, after
        `skip` of them."""
        self.asked, self._skip, self._path, self._where = asked, skip, Path(path), where
        self._names, available = self._read_header()
        available = max(0, available - skip)
        self._examples = available if asked is None else min(asked, available)
        self.batch_size = batch_size
        self._labels = self._read_labels()
        whole, self._hashes = self._scan()
        self._fingerprint = fingerprint(whole, self._labels)

    def __len__(self) -> int:
        return self._examples

    def batches(self) -> Sequence[Batch]:
        return LazyBatches(self._examples, self.batch_size, self._read)

    @property
    def labels(self) -> Tensor | None:
        return self._labels

    @property
    def fingerprint(self) -> str:
        return self._fingerprint

    def hashes(self) -> tuple[str, ...]:
        return self._hashes

    def _read_header(self) -> tuple[tuple[str, ...], int]:
        """Names of the inputs, and the number of examples in the file."""
        with open_tensor_file(self._path, self._where) as file:
            shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
        names = tuple(name for name in shapes if name != LABELS)
        if not names:
            raise DataError(
                f"{self._where}: {self._path} has no inputs",
                remedy='Name the tensors as the model\'s forward does, for example "pixel_values".',
            )
        flat = [name for name, shape in shapes.items() if not shape]
        if flat:
            raise DataError(
                f'{self._where}: "{flat[0]}" in {self._path} is a number, expected one row per example'
            )
        counts = {name: shape[0] for name, shape in shapes.items()}
        if len(set(counts.values())) > 1:
            found = ", ".join(f"{name} {count}" for name, count in counts.items())
            raise DataError(
                f"{self._where}: the first axes in {self._path} differ, expected one row per example: {found}"
            )
        if not counts[names[0]]:
            raise DataError(f"{self._where}: {self._path} is empty")
        return names, counts[names[0]]

    def _read(self, start: int, stop: int) -> Batch:
        with open_tensor_file(self._path, self._where) as file:
            start, stop = start + self._skip, stop + self._skip
            return {name: file.get_slice(name)[start:stop] for name in self._names}

    def _read_labels(self) -> Tensor | None:
        with open_tensor_file(self._path, self._where) as file:
            if LABELS not in file.keys():  # noqa: SIM118
                return None
            labels: Tensor = file.get_slice(LABELS)[self._skip : self._skip + self._examples]
        return labels

    def _scan(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Hashes of the examples as they are stored, and as the model sees them. Raises DataError where
        inputs are not finite."""
        hashes: list[str] = []
        seen: list[str] = []
        bad = dict.fromkeys(self._names, 0)
        for batch in self.batches():
            hashes.extend(example_hashes(batch))
            seen.extend(seen_hashes(batch))
            for name, value_B in batch.items():
                if value_B.is_floating_point():
                    bad[name] += int((~torch.isfinite(value_B)).sum())
        problems = [
            Problem(f'"{name}"', f"{count} values are NaN or infinite")
            for name, count in bad.items()
            if count
        ]
        if problems:
            raise DataError(f"{self._where}: {self._path} has inputs that are not finite", problems=problems)
        return tuple(hashes), tuple(seen)
