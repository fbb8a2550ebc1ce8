"""Trimming each tensor by itself, in row blocks: exactly so many of its entries, without sorting.

Shape letters: N experts, S the shape of a parameter (or of a block of its rows).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from merging import native
from merging.thresholds import KEEP_ALL, Near, magnitude_bits

Blocks = Callable[[], Iterable[Tensor]]
_LOW_BITS = 16
_LOW = 1 << _LOW_BITS
_HIGH = 1 << (31 - _LOW_BITS)


class Trim:
    """Which entries of a parameter are among each expert's largest, asked block by block, in their order.

    Of entries as large as the smallest one kept, the first are kept.
    """

    def __init__(self, blocks: Blocks, kept: int, entries: int) -> None:
        """`blocks`: walks over deltas_NS of all blocks. `kept`: how many of the `entries` of each expert."""
        self._cuts: list[_Cut] | None = None
        if kept < entries:
            self._cuts = _near_cuts(blocks, kept / entries, kept) or _cuts(blocks, kept)

    def of_block(self, deltas_NS: Tensor) -> Tensor:
        """Magnitudes (as bits, N) that the next block's entries must reach to be kept. In the one block where
        only some of those as large as the smallest are kept, the others are made 0 in `deltas_NS`."""
        found = []
        for (threshold, surplus_S), delta_S in zip(self._of_experts(deltas_NS), deltas_NS, strict=True):
            if surplus_S is not None:
                delta_S.masked_fill_(surplus_S, 0)
            found.append(threshold)
        return torch.tensor(found, dtype=torch.int32)

    def mask(self, deltas_NS: Tensor) -> Tensor:
        """Which of the next block's entries are kept."""
        kept = []
        for (threshold, surplus_S), delta_S in zip(self._of_experts(deltas_NS), deltas_NS, strict=True):
            mask_S = magnitude_bits(delta_S) >= threshold
            kept.append(mask_S if surplus_S is None else mask_S & ~surplus_S)
        return torch.stack(kept)

    def _of_experts(self, deltas_NS: Tensor) -> list[tuple[int, Tensor | None]]:
        if self._cuts is None:
            return [(KEEP_ALL, None)] * len(deltas_NS)
        return [cut.of_block(delta_S) for cut, delta_S in zip(self._cuts, deltas_NS, strict=True)]


@dataclass
class _Cut:
    """Of one expert: the smallest magnitude kept, and how many entries as large as that are still to be kept;
    None for all."""

    threshold: int
    wanted: int | None

    def of_block(self, delta_S: Tensor) -> tuple[int, Tensor | None]:
        """What the block's entries must reach, and which of those that do are not kept."""
        if self.wanted is None:
            return self.threshold, None
        if not self.wanted:
            return self.threshold + 1, None
        equal_E = (magnitude_bits(delta_S) == self.threshold).flatten().nonzero()[:, 0]
        surplus_S = None
        if len(equal_E) > self.wanted:
            surplus_E = torch.zeros(delta_S.numel(), dtype=torch.bool)
            surplus_E[equal_E[self.wanted :]] = True
            surplus_S = surplus_E.view(delta_S.shape)
        self.wanted = max(0, self.wanted - len(equal_E))
        return self.threshold, surplus_S


def _near_cuts(blocks: Blocks, share: float, kept: int) -> list[_Cut] | None:
    """By one walk, around what the first block says; None where that is unlike the rest."""
    near, walk = None, iter(blocks())
    for deltas_NS in walk:
        if near is None:
            if not (some := int(share * deltas_NS[0].numel())):
                return None
            near = Near(torch.tensor([cut.threshold for cut in _cuts(lambda: [deltas_NS], some)]))  # noqa: B023
        near.add("", deltas_NS)
    found = [] if near is None else near.ranked(kept)
    cuts = []
    for ranked in found:
        if ranked is None:
            return None
        threshold, larger, equal = ranked
        cuts.append(_cut(threshold, kept - larger, equal))
    return cuts


def _cut(threshold: int, wanted: int, equal: int) -> _Cut:
    return _Cut(threshold, None if threshold == 0 or wanted == equal else wanted)  # of zeros any will do


def _cuts(blocks: Blocks, kept: int) -> list[_Cut]:
    """The upper half of the bit patterns is counted, then the lower half within the one bin that matters."""
    high_NH = _counts(blocks, None)
    bins, above = _reaching(high_NH, [kept] * len(high_NH))
    rest = [kept - larger for larger in above]
    low_NL = _counts(blocks, bins)
    places, larger = _reaching(low_NL, rest)
    found = []
    for expert, (high, low) in enumerate(zip(bins, places, strict=True)):
        found.append(_cut(high * _LOW + low, rest[expert] - larger[expert], int(low_NL[expert, low])))
    return found


def _counts(blocks: Blocks, bins: list[int] | None) -> Tensor:
    """How many magnitudes of each expert have which upper bits; or, within its bin, which lower ones."""
    counts_NB = torch.zeros(0)
    for deltas_NS in blocks():
        if not len(counts_NB):
            counts_NB = torch.zeros((len(deltas_NS), _HIGH if bins is None else _LOW), dtype=torch.int64)
        compiled = native.stacked(deltas_NS)
        for expert, (counts_B, delta_S) in enumerate(zip(counts_NB, deltas_NS, strict=True)):
            high = None if bins is None else bins[expert]
            if compiled:
                native.count_(counts_B, delta_S, high)
                continue
            parts_E = magnitude_bits(delta_S).flatten()
            if high is not None:
                parts_E = parts_E[parts_E >> _LOW_BITS == high] & (_LOW - 1)
            else:
                parts_E = parts_E >> _LOW_BITS
            counts_B += parts_E.bincount(minlength=len(counts_B))
    return counts_NB


def _reaching(counts_NB: Tensor, kept: list[int]) -> tuple[list[int], list[int]]:
    """The bin of each expert's `kept`-th largest entry, and how many lie in bins above it."""
    reached_NB = counts_NB.flip(1).cumsum(1).flip(1)  # entries of each bin or a higher one
    bins = [int((reached_B >= count).sum()) - 1 for reached_B, count in zip(reached_NB, kept, strict=True)]
    above = [
        int(reached_B[bin_] - counts_B[bin_])
        for reached_B, counts_B, bin_ in zip(reached_NB, counts_NB, bins, strict=True)
    ]
    return bins, above
