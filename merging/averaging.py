"""AverageSource: the weighted mean of the experts, computed when a tensor is read.

Shape letters: N experts, S the shape of a parameter (or of a block of its rows).
"""

from __future__ import annotations

import torch
from torch import Tensor

from merging.checkpoints.source import CheckpointSource, TensorSpec
from merging.contracts.models import Models
from merging.contracts.vectors import TaskVectors
from merging.errors import RuleError
from merging.limits import Limits
from merging.task_vectors import onto, weighted_sum

_LEAST = 1e-8  # sum of weights
_BLOCK = 1 << 16  # entries of a row block, per model: all of them stay in the processor's cache


class AverageSource(CheckpointSource):
    """What layer-wise rules start from, and what they leave in tensors that they do not solve."""

    def __init__(self, models: Models) -> None:
        self.label = "average of the experts"
        self._models = models
        self._vectors = TaskVectors(models, torch.float64, blocked=True, limits=Limits(row_block=_BLOCK))
        weights_N = torch.tensor(
            [models.weights[task] for task in self._vectors.experts], dtype=torch.float64
        )
        if abs(float(weights_N.sum())) < _LEAST:
            raise RuleError("the experts' weights add up to 0: there is no average of them")
        self._shares_N = weights_N / weights_N.sum()

    def names(self) -> tuple[str, ...]:
        return self._models.base.names()

    def spec(self, name: str) -> TensorSpec:
        return self._models.base.spec(name)

    def read(self, name: str, rows: slice | None = None) -> Tensor:
        """In float64 for tensors that are averaged; the base's own tensor for those that are kept."""
        if name not in self._vectors.names:
            return self._models.base.read(name, rows)
        if rows is not None:
            return self._averaged(*self._vectors.read(name, rows))
        whole_S = torch.empty(self.spec(name).shape, dtype=torch.float64)
        for block, base_S, deltas_NS in self._vectors.blocks(name):
            whole_S[... if block is None else block] = self._averaged(base_S, deltas_NS)
        return whole_S

    def _averaged(self, base_S: Tensor, deltas_NS: Tensor) -> Tensor:
        return onto(base_S, weighted_sum(deltas_NS, self._shares_N), 1)
