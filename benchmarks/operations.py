"""How many operations a closed-form method needs on these shapes: the arithmetic floor, whoever does it.

Multiplications and additions of the matrix products alone; what is linear in the activations is left out.
So is the last block's extra Gram, where tokens that are not read out count less: the floor is never too
high.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.shapes import Linears


@dataclass(frozen=True)
class Walk:
    """What is walked: blocks of these linears, under tasks of so many tokens in sequences of `length`."""

    linears: tuple[Linears, ...]
    blocks: int
    tasks: int
    tokens: int  # of one task
    length: int
    hidden: int

    @property
    def block(self) -> float:
        """One block's forward on one task's tokens."""
        attention = 4.0 * self.tokens * self.length * self.hidden
        return sum(2.0 * self.tokens * one.inputs * one.outputs for one in self.linears) + attention

    @property
    def block_to_last_linear(self) -> float:
        """The same, ended by the input of the last linear."""
        last = self.linears[-1]
        return self.block - 2.0 * self.tokens * last.inputs * last.outputs

    @property
    def half_grams(self) -> float:
        """X'X of each feed; it is symmetric, so one half is enough."""
        return sum(1.0 * self.tokens * one.inputs**2 for one in self.linears)

    @property
    def cross_moments(self) -> float:
        """With targets: D x D through inputs, or O x D through the expert's own outputs where O < D."""
        return sum(2.0 * self.tokens * one.inputs * min(one.inputs, one.outputs) for one in self.linears)

    @property
    def right_sides(self) -> float:
        """W G of each task."""
        return sum(2.0 * one.outputs * one.inputs**2 for one in self.linears)

    @property
    def solves(self) -> float:
        """Cholesky, and two triangular solves for all outputs."""
        return sum(one.inputs**3 / 3 + 2.0 * one.outputs * one.inputs**2 for one in self.linears)


def operations(method: str, walk: Walk) -> dict[str, float]:
    """Part -> operations, for featcal, regmean, regmean_plus_plus and chain_of_merges."""
    each, rounds, onward = walk.tasks, walk.tasks * walk.blocks, walk.tasks * (walk.blocks - 1)
    forwards = {
        # the student's statistics, the expert's walk (its last linear's outputs are targets), the new block
        "featcal": rounds * (walk.block_to_last_linear + walk.block) + onward * walk.block,
        "regmean": onward * walk.block + each * walk.block_to_last_linear,
        "regmean_plus_plus": rounds * walk.block_to_last_linear + onward * walk.block,
        "chain_of_merges": onward * walk.block + each * walk.block_to_last_linear,
    }
    parts = {
        "forwards": forwards[method],
        "half Grams": rounds * walk.half_grams,
        "cross moments": rounds * walk.cross_moments if method == "featcal" else 0.0,
        "right-hand sides": rounds * walk.right_sides,
        "solves": walk.blocks * walk.solves,
    }
    return {part: count for part, count in parts.items() if count}


def seconds(counts: dict[str, float], rate: float) -> float:
    """`rate`: operations a second."""
    return sum(counts.values()) / rate


def walk_of(
    linears: Sequence[Linears], *, hidden: int, blocks: int, tasks: int, examples: int, length: int
) -> Walk:
    return Walk(tuple(linears), blocks, tasks, examples * length, length, hidden)
