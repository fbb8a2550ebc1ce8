"""ScaledSink: moves everything that is written towards the base, or further away from it."""

from __future__ import annotations

import torch
from torch import Tensor

from merging.checkpoints.sink import CheckpointSink
from merging.checkpoints.source import CheckpointSource


class ScaledSink(CheckpointSink):
    """Hands base + scale * (tensor - base) on to another sink, which it does not open or close."""

    def __init__(self, sink: CheckpointSink, base: CheckpointSource, scale: float) -> None:
        self._sink, self._base, self._scale = sink, base, scale

    def write(self, name: str, tensor: Tensor, rows: slice | None = None) -> None:
        if tensor.is_floating_point() and self._scale != 1:
            base = self._base.read(name, rows).to(tensor.device, torch.float64)
            tensor = base + self._scale * (tensor.to(torch.float64) - base)
        self._sink.write(name, tensor, rows)

    def close(self) -> None:
        """Left to the owner of the sink behind."""

    def abort(self) -> None:
        """Left to the owner of the sink behind."""
