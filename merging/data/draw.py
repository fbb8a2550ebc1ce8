"""Random draws that depend on the run's seed and on names alone, never on the order of the work."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def generator(seed: int, *names: str) -> torch.Generator:
    """A generator of its own for each seed and sequence of names."""
    import torch

    digest = hashlib.sha256("\0".join([str(seed), *names]).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)


def shuffled(count: int, seed: int, *names: str) -> list[int]:
    """The numbers below `count` in an order of their own for each seed and sequence of names."""
    import torch

    order: list[int] = torch.randperm(count, generator=generator(seed, *names)).tolist()
    return order


def drawn_order(sizes: Sequence[int], seed: int, task: str) -> list[tuple[int, int]]:
    """(class, example of that class) for all: round by round one of each class that has any left."""
    examples = [shuffled(size, seed, task, f"class {label}") for label, size in enumerate(sizes)]
    rounds = range(max(sizes, default=0))
    return [
        (label, examples[label][turn])
        for turn in rounds
        for label in shuffled(len(sizes), seed, task, f"round {turn}")
        if turn < sizes[label]
    ]
