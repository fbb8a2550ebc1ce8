"""AverageSource: the weighted mean of the experts, computed when a tensor is read."""

from __future__ import annotations

import torch
from torch import Tensor

from merging.checkpoints.source import CheckpointSource, TensorSpec
from merging.contracts.models import Models


class AverageSource(CheckpointSource):
    """What layer-wise rules start from, and what they leave in tensors that they do not solve."""

    def __init__(self, models: Models) -> None:
        self.label = "average of the experts"
        self._models = models
        total = sum(models.weights.values())
        self._shares = {task: models.weights[task] / total for task in models.tasks}

    def names(self) -> tuple[str, ...]:
        return self._models.base.names()

    def spec(self, name: str) -> TensorSpec:
        return self._models.base.spec(name)

    def read(self, name: str, rows: slice | None = None) -> Tensor:
        """In float64 for tensors that are averaged; the base's own tensor for those that are kept."""
        spec = self.spec(name)
        if not spec.dtype.is_floating_point or name in self._models.kept:
            return self._models.base.read(name, rows)
        base_S = self._models.base.read(name, rows).to(torch.float64)
        mean_S = torch.zeros_like(base_S)
        for task in sorted(self._models.tasks):
            mean_S += self._shares[task] * (
                self._models.experts[task].read(name, rows).to(torch.float64) - base_S
            )
        return base_S + mean_S
