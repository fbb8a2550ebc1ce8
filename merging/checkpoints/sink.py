"""CheckpointSink: where a merged or calibrated model is written, tensor by tensor, in any order."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from merging.checkpoints.rounding import rounded
from merging.checkpoints.source import CheckpointSource, TensorSpec
from merging.errors import CheckpointError

if TYPE_CHECKING:
    from merging.low_rank import LowRank


class CheckpointSink(ABC):
    """A context manager: leaving it cleanly publishes the whole result, an error leaves nothing.

    Names and shapes are the base's. Values are rounded to the stored dtype once, here.
    """

    @abstractmethod
    def write(self, name: str, tensor: Tensor, rows: slice | None = None) -> None:
        """Store a tensor, or those rows of it. Raises CheckpointError for a wrong name or shape."""

    takes_changes: bool = False
    """Whether `write_change` may be called."""

    def write_change(self, name: str, change: LowRank) -> None:
        """Store the base's tensor plus a change of which the factors are known; rank 0: the tensor itself."""
        raise NotImplementedError(f"{type(self).__name__} takes tensors only")

    @abstractmethod
    def close(self) -> None:
        """Publish; raises CheckpointError when a tensor was not written in full."""

    @abstractmethod
    def abort(self) -> None:
        """Leave nothing behind."""

    def __enter__(self) -> CheckpointSink:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.abort()


def nothing_to_check(folder: Path) -> None:
    """The check of sinks that are not told of one."""


def row_range(name: str, spec: TensorSpec, tensor: Tensor, rows: slice | None) -> tuple[int, int]:
    """First row and the one after the last; a single number is one row. A misfit is a CheckpointError."""
    first, last, expected = 0, (spec.shape or (1,))[0], spec.shape
    if rows is not None:
        if not spec.shape:
            raise CheckpointError(f'"{name}" is a single number and has no rows')
        first, last, step = rows.indices(last)
        last = max(first, last)
        expected = (last - first, *spec.shape[1:])
        if step != 1:
            raise CheckpointError(f'rows of "{name}" must be written one after another')
    if tuple(tensor.shape) != expected:
        raise CheckpointError(f'"{name}" is written as {tuple(tensor.shape)}, the base has {expected}')
    return first, last


def refuse_overlap(name: str, first: int, last: int, written: Iterable[tuple[int, int]]) -> None:
    """Raises CheckpointError for rows of which one was written before; `written`: first and last plus one."""
    if any(start < last and first < stop for start, stop in written):
        raise CheckpointError(
            f'rows {first} to {last} of "{name}" are written twice',
            remedy="Whoever writes (a rule, a plug-in, your script) must give each row once.",
        )


class StateDictSink(CheckpointSink):
    """Collects the result in memory: `tensors` after a clean exit."""

    def __init__(
        self, like: CheckpointSource, dtype: torch.dtype | None = None, *, allow_nonfinite: bool = False
    ) -> None:
        """`like` gives names, shapes and dtypes; `dtype` overrides that of floating tensors."""
        self._like, self._dtype, self._allow_nonfinite = like, dtype, allow_nonfinite
        self._rows: dict[str, list[tuple[int, int]]] = {}
        self._tensors: dict[str, Tensor] = {}

    @property
    def tensors(self) -> dict[str, Tensor]:
        return {name: self._tensors[name] for name in self._like.names()}

    def write(self, name: str, tensor: Tensor, rows: slice | None = None) -> None:
        spec = self._like.spec(name)
        dtype = self._dtype if self._dtype is not None and spec.dtype.is_floating_point else spec.dtype
        first, last = row_range(name, spec, tensor, rows)
        refuse_overlap(name, first, last, self._rows.get(name, ()))
        data = rounded(tensor.detach(), dtype, name=name, allow_nonfinite=self._allow_nonfinite)
        if name not in self._tensors:
            self._tensors[name] = torch.empty(spec.shape, dtype=dtype)
            self._rows[name] = []
        (self._tensors[name][first:last] if spec.shape else self._tensors[name]).copy_(data)
        self._rows[name].append((first, last))

    def close(self) -> None:
        short = [
            name
            for name in self._like.names()
            if sum(last - first for first, last in self._rows.get(name, ()))
            < (self._like.spec(name).shape[0] if self._like.spec(name).shape else 1)
        ]
        if short:
            raise CheckpointError(f"{len(short)} tensors were not written in full; first: {short[0]}")

    def abort(self) -> None:
        self._tensors.clear()
