"""CheckpointSource: named tensors that are read only when asked for."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor, nn

from merging import native
from merging.errors import CheckpointError

if TYPE_CHECKING:
    from merging.low_rank import LowRank


CopyRows: TypeAlias = Callable[[Tensor, slice | None, Tensor | None], None]
"""Fills a tensor, of any floating dtype, with those rows of another, less a third one if that is given;
CheckpointError where shapes differ."""


@dataclass(frozen=True)
class TensorSpec:
    """Shape and dtype of a tensor, known without reading it."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        return self.elements * self.dtype.itemsize


class CheckpointSource(ABC):
    """Named tensors, read only when asked for. What `read` returns is the caller's to keep, not to change."""

    label: str = "checkpoint"  # how messages call it: a folder, or 'expert "mnist"'
    files: tuple[Path, ...] = ()  # what is read, where it lies on disk
    notes: tuple[
        str, ...
    ] = ()  # what a user should know of how it is read: files ignored, entries passed over
    concurrent: bool = True  # whether several threads may read at once

    @abstractmethod
    def names(self) -> tuple[str, ...]:
        """All names, in the order in which they are stored."""

    @abstractmethod
    def spec(self, name: str) -> TensorSpec:
        """Shape and dtype, no data read. Raises CheckpointError for an unknown name."""

    @abstractmethod
    def read(self, name: str, rows: slice | None = None) -> Tensor:
        """The tensor in its stored dtype, or only those rows of its first axis."""

    def reading(self, name: str) -> AbstractContextManager[CopyRows]:
        """To read one tensor block by block, in one thread, into memory that is there already."""
        return _reading(self, name)

    def check_shape(self, name: str, shape: tuple[int, ...], target_S: Tensor) -> None:
        """CheckpointError where the tensor has another shape than the base's: a copy would broadcast it."""
        if shape != tuple(target_S.shape):
            raise CheckpointError(
                f'{self.label}: "{name}" has shape {shape}, the base {tuple(target_S.shape)}'
            )

    def shard(self, name: str) -> str | None:
        """The file that holds the tensor, where the tensors are spread over several by an index."""
        return None

    def factors(self, name: str) -> LowRank | None:
        """For an adapter on a base: what it adds to the base's tensor, exactly; None where not known."""
        return None


@contextmanager
def _reading(source: CheckpointSource, name: str) -> Iterator[CopyRows]:
    def copy(target_S: Tensor, rows: slice | None, less_S: Tensor | None) -> None:
        tensor_S = source.read(name, rows)
        source.check_shape(name, tuple(tensor_S.shape), target_S)
        fill_(target_S, tensor_S, less_S)

    yield copy


def fill_(target_S: Tensor, stored_S: Tensor, less_S: Tensor | None) -> None:
    """Copy a tensor, less another one if that is given, into one of the same shape."""
    if stored_S.dtype == torch.bfloat16 and stored_S.is_contiguous() and native.stacked(target_S[None]):
        native.from_bfloat16_(target_S, stored_S, less_S)
        return
    target_S.copy_(stored_S)
    if less_S is not None:
        target_S.sub_(less_S)


class StateDictSource(CheckpointSource):
    """A mapping of tensors, or a module, seen as a checkpoint."""

    def __init__(self, tensors: Mapping[str, Tensor] | nn.Module, label: str = "state dict") -> None:
        self.label = label
        self._tensors: Mapping[str, Tensor] = (
            tensors.state_dict() if isinstance(tensors, nn.Module) else tensors
        )

    def names(self) -> tuple[str, ...]:
        return tuple(self._tensors)

    def spec(self, name: str) -> TensorSpec:
        tensor = self._get(name)
        return TensorSpec(tuple(tensor.shape), tensor.dtype)

    def read(self, name: str, rows: slice | None = None) -> Tensor:
        tensor = self._get(name).detach()
        return tensor if rows is None else tensor[rows]

    def _get(self, name: str) -> Tensor:
        if name not in self._tensors:
            raise CheckpointError(f'{self.label} has no tensor "{name}"')
        return self._tensors[name]


class FilledSource(CheckpointSource):
    """Another source, and of a second one the tensors that it lacks."""

    def __init__(self, source: CheckpointSource, other: CheckpointSource, names: Iterable[str]) -> None:
        """`names`: those that are taken from `other`."""
        self.label, self.files, self.notes = source.label, source.files, source.notes
        self._source, self._other, self._filled = source, other, dict.fromkeys(names)

    def names(self) -> tuple[str, ...]:
        return (*self._source.names(), *self._filled)

    def spec(self, name: str) -> TensorSpec:
        return self._of(name).spec(name)

    def read(self, name: str, rows: slice | None = None) -> Tensor:
        return self._of(name).read(name, rows)

    def reading(self, name: str) -> AbstractContextManager[CopyRows]:
        return self._of(name).reading(name)

    def shard(self, name: str) -> str | None:
        return self._of(name).shard(name)

    def factors(self, name: str) -> LowRank | None:
        return None if name in self._filled else self._source.factors(name)

    def _of(self, name: str) -> CheckpointSource:
        return self._other if name in self._filled else self._source


class RenamedSource(CheckpointSource):
    """Another source's tensors under other names; what `names` does not list is hidden."""

    def __init__(self, source: CheckpointSource, names: Mapping[str, str]) -> None:
        """`names`: new name -> name in `source`."""
        self.label, self._source, self._names = source.label, source, dict(names)
        self.files, self.notes = source.files, source.notes

    def names(self) -> tuple[str, ...]:
        return tuple(self._names)

    def spec(self, name: str) -> TensorSpec:
        return self._source.spec(self._inner(name))

    def read(self, name: str, rows: slice | None = None) -> Tensor:
        return self._source.read(self._inner(name), rows)

    def reading(self, name: str) -> AbstractContextManager[CopyRows]:
        return self._source.reading(self._inner(name))

    def shard(self, name: str) -> str | None:
        return self._source.shard(self._inner(name))

    def factors(self, name: str) -> LowRank | None:
        return self._source.factors(self._inner(name))

    def _inner(self, name: str) -> str:
        if name not in self._names:
            raise CheckpointError(f'{self.label} has no tensor "{name}"')
        return self._names[name]
