"""Stem: what a model computes before its first block, answered by zeros where only the shape still counts."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree


@dataclass(frozen=True)
class _Like:
    """What a tensor was, but for its values. No tuple: that would be a branch of the tree it stands in."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device


class Stem:
    """The parts of a model outside all blocks that run before the first one.

    Once blocks answer with what was recorded, the stem's values are lost on the way, and only its shapes
    still matter. `Tried` says of which blocks that is true."""

    def __init__(self, model: nn.Module, blocks: Iterable[str]) -> None:
        names = tuple(blocks)
        around = {"", *(path for name in names for path in _prefixes(name))}
        self._parts = [
            module
            for name, module in model.named_modules()
            if name.rpartition(".")[0] in around and name not in around and name not in names
            if next(module.parameters(), None) is not None
        ]
        self._seen: dict[int, list[tuple[nn.Module, Any]]] = {}  # batch -> part and its answer, in order

    def __contains__(self, batch: int) -> bool:
        return batch in self._seen

    def watch(self, restore: ExitStack, batch: int) -> None:
        """Until `restore` unwinds, remember what the parts answer to this batch."""
        seen = self._seen[batch] = []

        def remember(module: nn.Module, args: Any, output: Any) -> None:
            seen.append((module, pytree.tree_map(_like, output)))

        for module in self._parts:
            restore.callback(module.register_forward_hook(remember).remove)

    def hollow(self, restore: ExitStack, batch: int) -> None:
        """Until `restore` unwinds, the parts answer with zeros where they were seen; then as always."""
        left: dict[nn.Module, list[Any]] = {}
        for module, answer in self._seen[batch]:
            left.setdefault(module, []).append(answer)
        for module, answers in left.items():
            _answer_with(restore, module, answers)


class Tried:
    """Block -> whether its arguments are the same with a hollow stem. Shared by walks of like models, so that
    each block is tried on one batch only; each walk also tries each of its batches once."""

    def __init__(self) -> None:
        self._same: dict[int, bool] = {}

    def __contains__(self, block: int) -> bool:
        return block in self._same

    def __setitem__(self, block: int, alike: bool) -> None:
        self._same[block] = alike

    def fails(self, block: int) -> bool:
        """Known to need the stem's values."""
        return not self._same.get(block, True)


def _answer_with(restore: ExitStack, module: nn.Module, answers: list[Any]) -> None:
    before = module.__dict__.get("forward")
    true = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        return pytree.tree_map(_zeros, answers.pop(0)) if answers else true(*args, **kwargs)

    def put_back() -> None:
        if before is None:
            module.__dict__.pop("forward", None)
        else:
            module.__dict__["forward"] = before

    restore.callback(put_back)
    module.__dict__["forward"] = forward


def _prefixes(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:end]) for end in range(1, len(parts))]


def _like(leaf: Any) -> Any:
    return _Like(leaf.shape, leaf.dtype, leaf.device) if isinstance(leaf, Tensor) else leaf


def _zeros(leaf: Any) -> Any:
    if not isinstance(leaf, _Like):
        return leaf
    return torch.zeros(leaf.shape, dtype=leaf.dtype, device=leaf.device)


_LARGE = 1 << 16  # entries


def hollow_input(value: Any) -> Any:
    """An argument of the model to go with a hollow stem: pictures and the like become zeros that take no
    memory, masks and token ids stay."""
    if not isinstance(value, Tensor) or not value.is_floating_point() or value.numel() < _LARGE:
        return value
    return torch.zeros((), dtype=value.dtype, device=value.device).expand(value.shape)


def same(one: Any, other: Any) -> bool:
    """Whether two trees of arguments have the same values, bit for bit."""
    ours, structure = pytree.tree_flatten(one)
    theirs, other_structure = pytree.tree_flatten(other)
    return structure == other_structure and all(map(_equal, ours, theirs))


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.shape == other.shape and one.dtype == other.dtype and torch.equal(one, other)
    return one is other or (isinstance(one, bool | int | float | str) and one == other)
