"""Thinning out task vectors: random drops, cuts by magnitude, and what makes up for the loss.

Shape letters: N experts, S the shape of a parameter.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from merging import native
from merging.task_vectors import disjoint_merge, elect_by_mass, largest, spread, weighted_sum
from merging.thresholds import magnitude_bits

Rescale = Literal["expectation", "norm", "none"]


def drop_(
    deltas_NS: Tensor,
    keep_NS: Tensor,
    probability: float | Tensor,
    rescale: Rescale,
    factors_N: Tensor | None = None,
) -> Tensor:
    """In place: the entries to keep, over their probability, scaled to each expert's L1 norm from before, or
    as they are; 0 elsewhere.

    `factors_N`: what makes up for the norm, if known; else it is that of these tensors."""
    if rescale == "expectation" and not isinstance(probability, Tensor):
        return _keep_(deltas_NS, keep_NS, probability)
    if rescale == "expectation":
        return _keep_(deltas_NS, keep_NS).div_(probability)
    if rescale == "none":
        return _keep_(deltas_NS, keep_NS)
    if factors_N is None:
        factors_N = norm_factors_([(deltas_NS, keep_NS)])
    else:
        _keep_(deltas_NS, keep_NS)
    return deltas_NS.mul_(spread(factors_N, deltas_NS))


def norm_factors_(blocks: Iterable[tuple[Tensor, Tensor]]) -> Tensor:
    """What each expert's kept entries are multiplied by, so that their L1 norm is that from before the drop;
    of (deltas_NS, keep_NS) in row blocks, whatever their size. The others are made 0 on the way."""
    before, after = [], []
    for deltas_NS, keep_NS in blocks:
        before.append(_row_norms(deltas_NS))
        after.append(_row_norms(_keep_(deltas_NS, keep_NS)))
    before_N, after_N = (torch.cat(rows, dim=1).sum(dim=1) for rows in (before, after))
    return (before_N / after_N).where(after_N > 0, 1)


def _keep_(deltas_NS: Tensor, keep_NS: Tensor, divisor: float = 1) -> Tensor:
    if native.stacked(deltas_NS):
        native.keep_(deltas_NS, keep_NS, divisor)
        return deltas_NS
    np.multiply(deltas_NS.numpy(), keep_NS.numpy(), out=deltas_NS.numpy())
    return deltas_NS if divisor == 1 else deltas_NS.div_(divisor)


def _row_norms(tensors_NS: Tensor) -> Tensor:
    """L1 norms of the rows (N, rows); of a vector's entries."""
    experts, rows, *rest = *tensors_NS.shape, *([1] if tensors_NS.ndim == 1 else [])
    return torch.linalg.vector_norm(tensors_NS.reshape(experts, rows, math.prod(rest)), 1, dim=2)


def rank_probabilities(deltas_NS: Tensor, density: float, epsilon: float) -> Tensor:
    """DELLA's p = (density - epsilon) + 2 epsilon (r - 1) / (n - 1), r the rank of the magnitude in its row.

    A row runs along the second axis of the parameter; a vector is one row. In a row of one, p = density.
    """
    axis = 2 if deltas_NS.ndim > 2 else 1
    if deltas_NS.ndim == 1 or deltas_NS.shape[axis] < 2:
        return torch.full_like(deltas_NS, density)
    ranks_NS = magnitude_bits(deltas_NS).argsort(dim=axis, stable=True).argsort(dim=axis)
    share_NS = ranks_NS.to(deltas_NS.dtype) / (deltas_NS.shape[axis] - 1)
    return (density - epsilon) + share_NS * 2 * epsilon


def between(entries: int, density: float, gamma: float) -> tuple[int, int]:
    """How many entries of a tensor are kept, int(density * n), and how many larger ones not, int(gamma * n).

    Where both cuts do not fit, the upper one shrinks.
    """
    kept = int(density * entries)
    return kept, min(int(gamma * entries), entries - kept)


def combined(deltas_NS: Tensor, weights_N: Tensor, *, elect: bool, normalize: bool) -> Tensor:
    """The weighted sum, of all entries or of those that agree with the sign of the sum (+ where it is zero).

    `normalize`: divided by the weights that went into it; a sum of weights of 0 counts as 1.
    """
    if elect:
        weighted_NS = deltas_NS * spread(weights_N, deltas_NS)
        sign_S = elect_by_mass(weighted_NS)
        sign_S = sign_S.where(sign_S != 0, 1)
        return disjoint_merge(weighted_NS, sign_S, weights_N, "mean" if normalize else "sum")
    sum_S = weighted_sum(deltas_NS, weights_N)
    total = float(weights_N.sum())
    return sum_S / total if normalize and abs(total) >= 1e-8 else sum_S


def most_varying(deltas_NS: Tensor, density: float) -> Tensor:
    """Mask (S) of the share `density` of those entries that differ between experts, by their variance."""
    apart_NS = deltas_NS - deltas_NS[0]  # exactly zero where experts agree, whatever their number
    mean_S = weighted_sum(apart_NS) / len(apart_NS)
    variance_S = weighted_sum((apart_NS - mean_S).square()) / len(apart_NS)
    return largest(variance_S, int(int((variance_S != 0).sum()) * density))


def energy_shares(deltas_NS: Tensor) -> Tensor:
    """Each expert's share in the sum of squares (N); equal shares where there is none."""
    energy_N = torch.stack([delta_S.square().sum() for delta_S in deltas_NS])
    total = energy_N.sum()
    return energy_N / total if total > 0 else torch.full_like(energy_N, 1 / len(energy_N))
