"""Forwards: what a model is called with, batch by batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from merging.backbones.padding import refuse_moved
from merging.contracts.backbone import Backbone, Batch


class Forwards(Sequence[dict[str, Any]]):
    """Keyword arguments of the forward, made when a batch is wanted. Raises DataError for one that is no text
    of its own: padded before it, in a model whose positions count padding."""

    def __init__(self, backbone: Backbone, batches: Sequence[Batch], device: torch.device | str) -> None:
        self._backbone, self._batches, self._device = backbone, batches, device

    def __len__(self) -> int:
        return len(self._batches)

    def __getitem__(self, index: Any) -> Any:
        batch = self._batches[index]
        refuse_moved(self._backbone, batch)
        kwargs = self._backbone.forward_kwargs(batch)
        return {
            name: value.to(self._device) if isinstance(value, Tensor) else value
            for name, value in kwargs.items()
        }
