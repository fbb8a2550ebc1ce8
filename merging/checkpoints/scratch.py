"""Scratch: memory for a moment, used again and again."""

from __future__ import annotations

import threading

import torch
from torch import Tensor

_KEPT = 1 << 22  # bytes that a thread keeps; more is taken from the system, and given back, each time


class Scratch(threading.local):
    """Memory of each thread's own, that costs no page faults at every use. What `bytes` hands out is valid
    until the thread asks for the next."""

    def __init__(self) -> None:
        self._kept = torch.empty(0, dtype=torch.uint8)

    def bytes(self, count: int) -> Tensor:
        if count > _KEPT:
            return torch.empty(count, dtype=torch.uint8)
        if len(self._kept) < count:
            self._kept = torch.empty(count, dtype=torch.uint8)
        return self._kept[:count]

    def like(self, tensor: Tensor) -> Tensor:
        """Memory for a tensor of the same shape and dtype."""
        return self.bytes(tensor.numel() * tensor.itemsize).view(tensor.dtype).view(tensor.shape)
