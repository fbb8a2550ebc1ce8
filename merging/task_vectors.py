"""Arithmetic on task vectors: trim, elect signs, merge what agrees; in pure functions of tensors.

Magnitudes are compared as float32, by their bit patterns: those of positive numbers sort as the numbers.
Sums over experts are added up in the order given, so that row blocks give the same bits as whole tensors.

Shape letters: N experts, S the shape of a parameter (or of a block of its rows).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Literal

import torch
from torch import Tensor

KEEP_ALL = 0  # a threshold that every magnitude reaches
_LOW_BITS = 16
_LOW = 1 << _LOW_BITS
_HIGH = 1 << (31 - _LOW_BITS)


def weighted_sum(tensors_NS: Tensor, weights_N: Tensor | None = None) -> Tensor:
    """sum_i w_i x_i, added up in order. torch's own sum orders the additions by the size of the block."""
    weights = [1.0] * len(tensors_NS) if weights_N is None else weights_N.tolist()
    total_S = tensors_NS[0] * weights[0]
    for weight, tensor_S in zip(weights[1:], tensors_NS[1:], strict=True):
        total_S += tensor_S if weight == 1 else tensor_S * weight
    return total_S


def magnitude_bits(tensor: Tensor) -> Tensor:
    """|x| rounded to float32, as an int32 that sorts as |x| does."""
    return tensor.to(torch.float32).view(torch.int32) & 0x7FFFFFFF


def magnitude_thresholds(vectors: Iterable[tuple[str, Tensor]], density: float) -> Tensor:
    """Per expert, the magnitude (as bits) which the largest share `density` of its whole task vector reaches.

    That is the (d - int(d * density))-th smallest of d magnitudes; equal ones are all kept. `vectors` is
    walked twice: the upper half of the bit patterns is counted, then the lower half within the one bin that
    matters. Exact, without sorting, in memory that does not grow with the model.
    """
    high_NH = _count(vectors, lambda bits_NS: bits_NS >> _LOW_BITS, _HIGH)
    elements = int(high_NH[0].sum())
    rank = elements - int(elements * density)
    if rank == 0:
        return torch.full((len(high_NH),), KEEP_ALL, dtype=torch.int32)
    bin_N, rank_N = _bin_of_rank(high_NH, torch.full((len(high_NH),), rank))
    low_NL = _count(vectors, lambda bits_NS: _low_within(bits_NS, bin_N), _LOW)
    low_N, _ = _bin_of_rank(low_NL, rank_N)
    return (bin_N * _LOW + low_N).to(torch.int32)


def trim(deltas_NS: Tensor, threshold_N: Tensor) -> Tensor:
    """Entries whose magnitude reaches their expert's threshold; zero elsewhere."""
    return deltas_NS.where(magnitude_bits(deltas_NS) >= spread(threshold_N, deltas_NS), 0)


def largest(magnitudes_S: Tensor, count: int) -> Tensor:
    """Mask of exactly `count` entries, none smaller than any left out; of equal ones the first are taken.

    `magnitudes_S`: anything that sorts as the magnitudes do, such as `magnitude_bits`.
    """
    flat = magnitudes_S.flatten()
    if count >= len(flat):
        return torch.ones_like(magnitudes_S, dtype=torch.bool)
    if count <= 0:
        return torch.zeros_like(magnitudes_S, dtype=torch.bool)
    threshold = flat.kthvalue(len(flat) - count + 1).values
    mask = flat > threshold
    equal = (flat == threshold).nonzero().flatten()
    mask[equal[: count - int(mask.sum())]] = True
    return mask.view(magnitudes_S.shape)


def trim_each(deltas_NS: Tensor, density: float) -> Tensor:
    """The int(density * numel) largest entries of each expert (one, where that is none); zero elsewhere."""
    count = max(1, int(density * deltas_NS[0].numel()))
    return torch.stack([delta_S.where(largest(magnitude_bits(delta_S), count), 0) for delta_S in deltas_NS])


def elect_by_mass(deltas_NS: Tensor) -> Tensor:
    """The sign of the sum: -1, 0 or 1."""
    return weighted_sum(deltas_NS).sign()


def elect_by_largest_share(deltas_NS: Tensor, norms_N: Tensor) -> Tensor:
    """The sign of the expert for which the entry is the largest part of its squared norm, first of equals."""
    norms_NS = spread(norms_N.clamp(min=torch.finfo(norms_N.dtype).tiny), deltas_NS)
    winner_S = (deltas_NS / norms_NS).square().argmax(dim=0, keepdim=True)
    return deltas_NS.gather(0, winner_S)[0].sign()


def norms(vectors: Iterable[tuple[str, Tensor]]) -> Tensor:
    """The Euclidean norm of each expert's whole task vector."""
    squares = [torch.stack([delta_S.square().sum() for delta_S in deltas_NS]) for _, deltas_NS in vectors]
    return weighted_sum(torch.stack(squares)).sqrt() if squares else torch.zeros(0)


def spread(values_N: Tensor, tensors_NS: Tensor) -> Tensor:
    """One value per expert, in a shape that multiplies `tensors_NS`."""
    return values_N.view(-1, *[1] * (tensors_NS.ndim - 1))


def agreeing(deltas_NS: Tensor, sign_S: Tensor) -> Tensor:
    """Entries of the elected sign (-1 or 1; 0 elects none); zero elsewhere."""
    return (deltas_NS * sign_S).clamp_(min=0) * sign_S


def disjoint_merge(
    deltas_NS: Tensor, sign_S: Tensor, weights_N: Tensor, how: Literal["mean", "sum", "max"]
) -> Tensor:
    """One value of the entries that agree with the elected sign: their mean, their sum, or the largest.

    `deltas_NS` are already times their weights; the mean divides by the weights of those that agree.
    """
    along_NS = (deltas_NS * sign_S).clamp_(min=0)
    if how == "max":
        return along_NS.amax(dim=0) * sign_S
    total_S = weighted_sum(along_NS) * sign_S
    if how == "sum":
        return total_S
    divisor_S = weighted_sum(along_NS.sign(), weights_N)
    return total_S / divisor_S.where(divisor_S.abs() >= 1e-8, 1)


def _count(
    vectors: Iterable[tuple[str, Tensor]], bins_of: Callable[[Tensor], Iterable[Tensor]], bins: int
) -> Tensor:
    counts_NH: Tensor | None = None
    for _, deltas_NS in vectors:
        binned = bins_of(magnitude_bits(deltas_NS))
        counted_NH = torch.stack([entries.flatten().bincount(minlength=bins) for entries in binned])
        counts_NH = counted_NH if counts_NH is None else counts_NH.add_(counted_NH)
    return torch.zeros((1, bins), dtype=torch.int64) if counts_NH is None else counts_NH


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
