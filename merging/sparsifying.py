"""Thinning out task vectors: random drops, cuts by magnitude, and what makes up for the loss.

Shape letters: N experts, S the shape of a parameter.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from merging import native
from merging.task_vectors import disjoint_merge, elect_by_mass, largest, masked, spread, weighted_sum
from merging.thresholds import magnitude_bits

Rescale = Literal["expectation", "norm", "none"]


def dropped(deltas_NS: Tensor, keep_NS: Tensor, probability: float | Tensor, rescale: Rescale) -> Tensor:
    """The entries to keep: over their probability, scaled to each expert's L1 norm from before, or as is."""
    if rescale != "norm" and not isinstance(probability, Tensor) and native.stacked(deltas_NS):
        return native.kept(deltas_NS, keep_NS, probability if rescale == "expectation" else 1)
    kept_NS = masked(deltas_NS, keep_NS.numpy())
    if rescale == "expectation":
        return kept_NS.div_(probability)
    if rescale == "none":
        return kept_NS
    before_N = torch.stack([delta_S.abs().sum() for delta_S in deltas_NS])
    after_N = torch.stack([kept_S.abs().sum() for kept_S in kept_NS])
    return kept_NS * spread((before_N / after_N).where(after_N > 0, 1), deltas_NS)


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


def without_outliers(delta_S: Tensor, density: float, gamma: float) -> Tensor:
    """int(density * n) entries: without the int(gamma * n) largest, and for the rest without the smallest.

    Where both cuts do not fit, the upper one shrinks.
    """
    entries = delta_S.numel()
    keep = int(density * entries)
    top = min(int(gamma * entries), entries - keep)
    bits_S = magnitude_bits(delta_S)
    return masked(delta_S, (largest(bits_S, keep + top) & ~largest(bits_S, top)).numpy())


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
