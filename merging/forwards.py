"""Forwards: what a model is called with, batch by batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from merging.backbones.padding import refuse_moved
from merging.contracts.backbone import Backbone, Batch


class Forwards(Sequence[dict[str, Any]]):
    """Keyword arguments of the forward, made when a batch is wanted."""

    def __init__(
        self,
        backbone: Backbone,
        batches: Sequence[Batch],
        device: torch.device | str,
        *,
        measured: bool = False,
    ) -> None:
        """`measured`: for statistics. Then DataError is raised for a batch that is not what its texts are one
        by one: padded before them, say, in a model whose positions count padding."""
        self._backbone, self._batches, self._device = backbone, batches, device
        self._measured = measured

    def __len__(self) -> int:
        return len(self._batches)

    def __getitem__(self, index: Any) -> Any:
        batch = self._batches[index]
        if self._measured:
            refuse_moved(self._backbone, batch)
        kwargs = self._backbone.forward_kwargs(batch)
        return {
            name: value.to(self._device) if isinstance(value, Tensor) else value
            for name, value in kwargs.items()
        }
