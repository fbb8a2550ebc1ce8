"""Portion: some of a task's examples, by their place, so that what is fitted and what is judged differ."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import overload

import torch
from torch import Tensor

from merging.contracts.backbone import Batch
from merging.data.task import Examples


class Portion(Examples):
    """The examples whose number (from 0) `belongs`; in batches like those of the whole, only smaller."""

    def __init__(self, whole: Examples, belongs: Callable[[int], bool], name: str) -> None:
        """`name`: goes into the fingerprint, beside that of the whole."""
        self.asked, self._whole, self._name = None, whole, name
        rows: list[tuple[int, Tensor]] = []
        start = 0
        for number, batch in enumerate(whole.batches()):
            size = len(next(iter(batch.values())))
            kept = [row for row in range(size) if belongs(start + row)]
            if kept:
                rows.append((number, torch.tensor(kept)))
            start += size
        self._rows = rows
        self._numbers = [number for number in range(start) if belongs(number)]

    def __len__(self) -> int:
        return len(self._numbers)

    def batches(self) -> Sequence[Batch]:
        return _Parts(self._whole.batches(), self._rows)

    @property
    def labels(self) -> Tensor | None:
        labels = self._whole.labels
        return None if labels is None else labels[self._numbers]

    @property
    def fingerprint(self) -> str:
        return hashlib.sha256(f"{self._whole.fingerprint} {self._name}".encode()).hexdigest()

    def hashes(self) -> tuple[str, ...]:
        whole = self._whole.hashes()
        return tuple(whole[number] for number in self._numbers) if whole else ()


class _Parts(Sequence[Batch]):
    """Rows of another sequence's batches, read when asked for."""

    def __init__(self, batches: Sequence[Batch], rows: Sequence[tuple[int, Tensor]]) -> None:
        self._batches, self._rows = batches, rows

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, index: int) -> Batch: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Batch]: ...

    def __getitem__(self, index: int | slice) -> Batch | Sequence[Batch]:
        if isinstance(index, slice):
            return _Parts(self._batches, self._rows[index])
        number, rows = self._rows[index]
        return {name: value[rows] for name, value in self._batches[number].items()}
