"""Records: activations that must wait for the next block, in memory up to a budget and on disk beyond it."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

DEFAULT_MEMORY = 256 << 20


class _OnDisk(NamedTuple):
    path: Path
    shape: torch.Size
    dtype: torch.dtype


class Records:
    """Nested tensors by key; a key that is put again is replaced. What `get` returns is a copy, safe to
    edit."""

    def __init__(self, folder: Path | None = None, *, memory: int | None = None) -> None:
        """`folder`: where the rest goes (default: a temporary folder); `memory`: bytes that may stay in
        memory (default: DEFAULT_MEMORY)."""
        self._memory, self._used = DEFAULT_MEMORY if memory is None else memory, 0
        self._parent = folder
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._entries: dict[object, tuple[list[Any], Any]] = {}
        self._files: dict[object, int] = {}

    @property
    def bytes_in_memory(self) -> int:
        return self._used

    def put(self, key: object, value: Any) -> None:
        self.drop(key)
        leaves, structure = pytree.tree_flatten(value)
        stored = [
            self._store(key, place, leaf) if isinstance(leaf, Tensor) else leaf
            for place, leaf in enumerate(leaves)
        ]
        self._entries[key] = (stored, structure)

    def get(self, key: object) -> Any:
        stored, structure = self._entries[key]
        return pytree.tree_unflatten([_fresh(leaf) for leaf in stored], structure)

    def __contains__(self, key: object) -> bool:
        return key in self._entries

    def drop(self, key: object) -> None:
        """Forget a key; no error if there is none."""
        for leaf in self._entries.pop(key, ((), None))[0]:
            if isinstance(leaf, Tensor):
                self._used -= leaf.nbytes

    def close(self) -> None:
        self._entries.clear()
        self._used = 0
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def _store(self, key: object, place: int, tensor: Tensor) -> Tensor | _OnDisk:
        tensor = tensor.detach()
        if self._used + tensor.nbytes <= self._memory:
            self._used += tensor.nbytes
            return tensor.clone()
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="activations-", dir=self._parent)
        number = self._files.setdefault((key, place), len(self._files))
        path = Path(self._folder.name) / str(number)
        plain = tensor.cpu().contiguous()
        with path.open("wb") as file:
            file.write(plain.reshape(-1).view(torch.uint8).numpy().data)
        return _OnDisk(path, plain.shape, plain.dtype)


def _fresh(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return leaf.clone()
    if isinstance(leaf, _OnDisk):
        tensor = torch.empty(leaf.shape, dtype=leaf.dtype)
        with leaf.path.open("rb") as file:
            file.readinto(tensor.reshape(-1).view(torch.uint8).numpy().data)
        return tensor
    return leaf
