"""LazyBatches: a sequence of batches, each made when it is asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import overload

from merging.contracts.backbone import Batch


class LazyBatches(Sequence[Batch]):
    """Like a tuple of batches, but only the one in use is in memory."""

    def __init__(self, examples: int, batch_size: int, read: Callable[[int, int], Batch]) -> None:
        """`read(start, stop)` gives the batch of those examples."""
        self._examples, self._batch_size, self._read = examples, batch_size, read

    def __len__(self) -> int:
        return -(-self._examples // self._batch_size)

    @overload
    def __getitem__(self, index: int) -> Batch: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Batch]: ...

    def __getitem__(self, index: int | slice) -> Batch | Sequence[Batch]:
        positions = range(len(self))[index]
        if isinstance(positions, range):
            return _Selected(self, positions)
        start = positions * self._batch_size
        return self._read(start, min(start + self._batch_size, self._examples))


class _Selected(Sequence[Batch]):
    """Some batches of another sequence, as lazy as that one."""

    def __init__(self, batches: Sequence[Batch], positions: range) -> None:
        self._batches, self._positions = batches, positions

    def __len__(self) -> int:
        return len(self._positions)

    @overload
    def __getitem__(self, index: int) -> Batch: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Batch]: ...

    def __getitem__(self, index: int | slice) -> Batch | Sequence[Batch]:
        if isinstance(index, slice):
            return _Selected(self._batches, self._positions[index])
        return self._batches[self._positions[index]]
