"""magnitude_thresholds: where a share of all entries of a model is cut off, exactly, without sorting.

Magnitudes are compared as float32, by their bit patterns: those of positive numbers sort as the numbers.

Shape letters: N experts, S the shape of a parameter (or of a block of its rows).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from merging import native

Item = TypeVar("Item")
KEEP_ALL = 0  # a threshold that every magnitude reaches
_WINDOW = 1 << 18  # bit patterns around the guess: about 1.5 % of the magnitude to both sides
_SAMPLED = 64  # row blocks that a guess is made from
_HELD = 1 << 20  # entries of the window that wait to be counted
_LOW_BITS = 16
_LOW = 1 << _LOW_BITS
_HIGH = 1 << (31 - _LOW_BITS)


class Vectors(Protocol):
    """Task vectors that can be walked several times; each process of a run visits its share of them."""

    @property
    def experts(self) -> Sequence[str]: ...

    def visit(self, action: Callable[[str, Tensor], None], *, every: int = 1) -> None:
        """`action(name, deltas_NS)` for each block, or for one in so many, maybe from several threads."""

    def count(self) -> int:
        """How many blocks there are."""

    def total_(self, sums: Tensor) -> Tensor:
        """Sums of what this process visited -> of all processes', in place."""

    def gathered(self, parts: dict[str, Item]) -> dict[str, Item]:
        """By parameter, what this process found -> what all found."""


def magnitude_bits(tensor: Tensor) -> Tensor:
    """|x| rounded to float32, as an int32 that sorts as |x| does."""
    return tensor.to(torch.float32).view(torch.int32) & 0x7FFFFFFF


def magnitude_thresholds(vectors: Vectors, density: float) -> Tensor:
    """Per expert, the magnitude (as bits) which the largest share `density` of its whole task vector reaches.

    That is the (d - int(d * density))-th smallest of d magnitudes; equal ones are all kept. A sample says
    where it should lie, and one walk counts what is above and ranks what is near; where the sample was wrong,
    two more walks find it. Exact, in memory that does not grow with the model.
    """
    if density == 1:
        return torch.full((_experts(vectors),), KEEP_ALL, dtype=torch.int32)
    every = vectors.count() // _SAMPLED
    if every > 1:
        near = Near(_ranked(vectors, density, every))
        vectors.visit(near.add)
        found = near.thresholds(density, vectors)
        if found is not None:
            return found
    return _ranked(vectors, density, 1)


class Near:
    """Counts the entries above a window of bit patterns, and each pattern inside it."""

    def __init__(self, guess_N: Tensor) -> None:
        self._low = [max(0, guess - _WINDOW // 2) for guess in guess_N.tolist()]
        self._inside = np.zeros((len(guess_N), _WINDOW), dtype=np.int64)
        self._above = np.zeros(len(guess_N), dtype=np.int64)
        self._elements = np.zeros(1, dtype=np.int64)
        self._waiting: list[list[np.ndarray]] = [[] for _ in self._low]
        self._held = 0
        self._lock = threading.Lock()

    def add(self, name: str, deltas_NS: Tensor) -> None:
        above, near = [], []
        compiled = native.stacked(deltas_NS)
        for low, delta_S in zip(self._low, deltas_NS, strict=True):
            if compiled:
                count, inside = native.near(delta_S, low, _WINDOW)
                above.append(count)
                near.append(inside.numpy())
                continue
            from_low_S = magnitude_bits(delta_S).flatten().numpy() - np.int32(low)
            above.append(int(np.count_nonzero(from_low_S >= _WINDOW)))
            near.append(from_low_S[from_low_S.view(np.uint32) < _WINDOW])
        with self._lock:
            self._elements += deltas_NS[0].numel()
            self._above += above
            for waiting, patterns in zip(self._waiting, near, strict=True):
                waiting.append(patterns)
                self._held += len(patterns)
            if self._held > _HELD:
                self._count()

    def ranked(self, kept: int) -> list[tuple[int, int, int] | None]:
        """Of each expert, its `kept`-th largest magnitude (as bits), how many are larger, and how many as
        large; None where it lies outside the window."""
        self._count()
        found: list[tuple[int, int, int] | None] = []
        for low, above, inside in zip(self._low, self._above, self._inside, strict=True):
            reached = above + inside[::-1].cumsum()[::-1]  # entries of each pattern or a larger one
            place = int(np.count_nonzero(reached >= kept)) - 1
            if place < 0 or above >= kept:
                found.append(None)
            else:
                found.append((low + place, int(reached[place] - inside[place]), int(inside[place])))
        return found

    def thresholds(self, density: float, vectors: Vectors) -> Tensor | None:
        """None where some expert's lies outside its window."""
        self._count()
        for counts in (self._elements, self._above, self._inside):
            vectors.total_(torch.from_numpy(counts))
        kept = int(int(self._elements[0]) * density)
        found = []
        for low, above, inside in zip(self._low, self._above, self._inside, strict=True):
            reached = above + inside[::-1].cumsum()[::-1]  # entries of each pattern or a larger one
            places = np.flatnonzero(reached > kept)  # those that more than the share reaches
            if above > kept or not len(places):
                return None
            found.append(low + int(places[-1]))
        return torch.tensor(found, dtype=torch.int32)

    def _count(self) -> None:
        for counts, waiting in zip(self._inside, self._waiting, strict=True):
            if waiting:
                counts += np.bincount(np.concatenate(waiting), minlength=_WINDOW)
                waiting.clear()
        self._held = 0


def _ranked(vectors: Vectors, density: float, every: int) -> Tensor:
    """The thresholds of all blocks, or of one in `every`: the upper half of the bit patterns is counted, then
    the lower half within the one bin that matters."""
    high_NH = _counted(vectors, lambda bits_NS: bits_NS >> _LOW_BITS, _HIGH, every)
    elements = int(high_NH[0].sum())
    rank = elements - int(elements * density)
    if rank == 0:
        return torch.full((len(high_NH),), KEEP_ALL, dtype=torch.int32)
    bin_N, rank_N = _bin_of_rank(high_NH, torch.full((len(high_NH),), rank))
    low_NL = _counted(vectors, lambda bits_NS: _low_within(bits_NS, bin_N), _LOW, every)
    low_N, _ = _bin_of_rank(low_NL, rank_N)
    return (bin_N * _LOW + low_N).to(torch.int32)


def _counted(vectors: Vectors, bins_of: Callable[[Tensor], object], bins: int, every: int) -> Tensor:
    total_NH = torch.zeros((1, bins), dtype=torch.int64)
    lock = threading.Lock()

    def add(name: str, deltas_NS: Tensor) -> None:
        nonlocal total_NH
        binned = bins_of(magnitude_bits(deltas_NS))
        counts_NH = torch.stack([part.flatten().bincount(minlength=bins) for part in binned])  # type: ignore[attr-defined]
        with lock:
            total_NH = total_NH + counts_NH

    vectors.visit(add, every=every)
    if not total_NH.any():  # this process saw no block: others know how many experts there are
        total_NH = torch.zeros((_experts(vectors), bins), dtype=torch.int64)
    return vectors.total_(total_NH)


def _low_within(bits_NS: Tensor, bin_N: Tensor) -> list[Tensor]:
    """The lower bits of those entries of each expert that lie in its bin."""
    return [
        bits_S[bits_S >> _LOW_BITS == bin_] & (_LOW - 1)
        for bits_S, bin_ in zip(bits_NS, bin_N.tolist(), strict=True)
    ]


def _bin_of_rank(counts_NH: Tensor, rank_N: Tensor) -> tuple[Tensor, Tensor]:
    """The bin that holds the rank-th entry (from 1), and its rank within that bin."""
    total_NH = counts_NH.cumsum(dim=1)
    bin_N = (total_NH < rank_N[:, None]).sum(dim=1)
    before_N = total_NH.gather(1, bin_N[:, None])[:, 0] - counts_NH.gather(1, bin_N[:, None])[:, 0]
    return bin_N, rank_N - before_N


def _experts(vectors: Vectors) -> int:
    return max(1, len(vectors.experts))
