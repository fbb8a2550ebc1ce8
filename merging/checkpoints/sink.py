"""CheckpointSink: where a merged or calibrated model is written, tensor by tensor, in any order."""

from __future__ import annotations

from abc import ABC, abstractmethod
from types import TracebackType

import torch
from torch import Tensor

from merging.checkpoints.source import CheckpointSource
from merging.errors import CheckpointError


class CheckpointSink(ABC):
    """A context manager: leaving it cleanly publishes the whole result, an error leaves nothing.

    Names and shapes are the base's. Values are rounded to the stored dtype once, here.
    """

    @abstractmethod
    def write(self, name: str, tensor: Tensor, rows: slice | None = None) -> None:
        """Store a tensor, or those rows of it. Raises CheckpointError for a wrong name or shape."""

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


class StateDictSink(CheckpointSink):
    """Collects the result in memory: `tensors` after a clean exit."""

    def __init__(self, like: CheckpointSource, dtype: torch.dtype | None = None) -> None:
        """`like` gives names, shapes and dtypes; `dtype` overrides that of floating tensors."""
        self._like, self._dtype = like, dtype
        self._rows: dict[str, int] = {}
        self._tensors: dict[str, Tensor] = {}

    @property
    def tensors(self) -> dict[str, Tensor]:
        return {name: self._tensors[name] for name in self._like.names()}

    def write(self, name: str, tensor: Tensor, rows: slice | None = None) -> None:
        spec = self._like.spec(name)
        dtype = self._dtype if self._dtype is not None and spec.dtype.is_floating_point else spec.dtype
        if name not in self._tensors:
            self._tensors[name] = torch.empty(spec.shape, dtype=dtype)
            self._rows[name] = 0
        target = self._tensors[name] if rows is None else self._tensors[name][rows]
        if target.shape != tensor.shape:
            raise CheckpointError(
                f'"{name}" is written as {tuple(tensor.shape)}, the base has {tuple(target.shape)}'
            )
        target.copy_(tensor)
        self._rows[name] += target.shape[0] if target.ndim else 1

    def close(self) -> None:
        short = [
            name
            for name in self._like.names()
            if self._rows.get(name, 0)
            < (self._like.spec(name).shape[0] if self._like.spec(name).shape else 1)
        ]
        if short:
            raise CheckpointError(f"{len(short)} tensors were not written in full; first: {short[0]}")

    def abort(self) -> None:
        self._tensors.clear()
