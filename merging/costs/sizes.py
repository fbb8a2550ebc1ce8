"""Sizes: what the laws of memory and time look at. Counts are of entries unless they are called bytes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class FeedSizes:
    """One feed: so many inputs, so many outputs of all its linears."""

    inputs: int
    outputs: int
    linears: int = 1


@dataclass(frozen=True)
class BlockSizes:
    """One block, and what running it on one example of the longest kind takes."""

    elements: int
    feeds: tuple[FeedSizes, ...]
    tokens: int = 0
    operations: float = 0.0  # of its forward
    alive: int = 0  # bytes of activations at most, inputs and output with them
    output: int = 0  # bytes that wait for the next block


@dataclass(frozen=True)
class Walk:
    """A model that is walked block by block, and the examples it is walked on."""

    outside: int  # parameters that lie in no block that is walked
    blocks: tuple[BlockSizes, ...]
    examples: int  # of all tasks
    batch: int  # examples of the largest batch
    stem: float = 0.0  # operations of what runs before the first block, per example
    inputs: int = 0  # bytes of one example
    itemsize: int = 4  # bytes of an entry of weights and activations, as they are computed with

    @property
    def widest_output(self) -> int:
        """Bytes that wait of one example, at most."""
        return max((block.output for block in self.blocks), default=0)


@dataclass(frozen=True)
class Sizes:
    """Of everything that a run works on."""

    experts: int
    tensors: tuple[tuple[int, ...], ...]  # shapes of the base's floating tensors
    base_bytes: int  # as stored
    expert_bytes: int  # of all experts together
    output_bytes: int
    itemsize: int  # bytes of a stored entry, the widest
    threads: int
    row_block: int  # entries of a row block
    activation_memory: int  # bytes of activations that may wait in memory
    walk: Walk | None = None

    @property
    def parameters(self) -> int:
        return sum(map(count, self.tensors))

    @property
    def largest(self) -> int:
        return max(map(count, self.tensors), default=0)


def count(shape: tuple[int, ...]) -> int:
    """Entries of a tensor."""
    total = 1
    for size in shape:
        total *= size
    return total
