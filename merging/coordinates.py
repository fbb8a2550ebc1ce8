"""Coordinates of task vectors as models: a base of zeros, and experts that are computed when read.

Shape letters: K and L, the sizes of the two bases of a space.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from merging.checkpoints.sink import CheckpointSink, row_range
from merging.checkpoints.source import CheckpointSource, TensorSpec
from merging.contracts.models import Models
from merging.errors import CheckpointError
from merging.shared_space import Space


class Coordinates:
    """The models that an inner rule merges. The latest space is kept, others are made when asked for."""

    def __init__(self, names: Sequence[str], models: Models, make: Callable[[str], Space]) -> None:
        self._make = make
        self._latest: tuple[str, Space] | None = None
        self.shapes = {name: tuple(self.space(name).coordinates_NKL[0].shape) for name in names}
        self.base = _Zeros(self)
        experts = {task: _Expert(self, index, task) for index, task in enumerate(sorted(models.tasks))}
        self.models = Models(self.base, experts, {task: models.weights[task] for task in experts})

    def space(self, name: str) -> Space:
        if self._latest is None or self._latest[0] != name:
            self._latest = (name, self._make(name))
        return self._latest[1]


class _Zeros(CheckpointSource):
    concurrent = False  # one space is kept at a time

    def __init__(self, spaces: Coordinates) -> None:
        self.label, self._spaces = "base", spaces

    def names(self) -> tuple[str, ...]:
        return tuple(self._spaces.shapes)

    def spec(self, name: str) -> TensorSpec:
        return TensorSpec(self._spaces.shapes[name], torch.float64)

    def read(self, name: str, rows: slice | None = None) -> Tensor:
        shape = self._spaces.shapes[name]
        height = shape[0] if rows is None else len(range(*rows.indices(shape[0])))
        return torch.zeros(height, *shape[1:], dtype=torch.float64)


class _Expert(_Zeros):
    def __init__(self, spaces: Coordinates, index: int, task: str) -> None:
        super().__init__(spaces)
        self.label, self._index = f'expert "{task}"', index

    def read(self, name: str, rows: slice | None = None) -> Tensor:
        coordinates_KL = self._spaces.space(name).coordinates_NKL[self._index]
        return coordinates_KL if rows is None else coordinates_KL[rows]


class Returning(CheckpointSink):
    """Hands each tensor on as soon as its last row is there."""

    def __init__(self, like: CheckpointSource, done: Callable[[str, Tensor], None]) -> None:
        self._like, self._done = like, done
        self._parts: dict[str, list[tuple[int, Tensor]]] = {}
        self._finished: set[str] = set()

    def write(self, name: str, tensor: Tensor, rows: slice | None = None) -> None:
        spec = self._like.spec(name)
        first, _ = row_range(name, spec, tensor, rows)
        parts = self._parts.setdefault(name, [])
        parts.append((first, tensor.detach()))
        if sum(len(part) for _, part in parts) == spec.shape[0]:
            ordered = [part for _, part in sorted(self._parts.pop(name), key=lambda item: item[0])]
            self._finished.add(name)
            self._done(name, torch.cat(ordered))

    def close(self) -> None:
        lost = [name for name in self._like.names() if name not in self._finished]
        if lost:
            raise CheckpointError(f"{len(lost)} tensors were not written in full; first: {lost[0]}")

    def abort(self) -> None:
        self._parts.clear()
