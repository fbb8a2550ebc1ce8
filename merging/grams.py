"""What layer-wise rules do to a Gram before they solve: make it a correlation, measure its off-diagonal.

Shape letters: D features.
"""

from __future__ import annotations

import torch
from torch import Tensor


def correlation(gram_DD: Tensor) -> Tensor:
    """Each feature scaled to length 1 over the tokens: G_pq / sqrt(G_pp G_qq); dead features stay 0."""
    scale_D = gram_DD.diagonal().clamp_min(0).sqrt()
    inverse_D = torch.where(scale_D > 0, 1.0 / scale_D, torch.zeros_like(scale_D))
    return gram_DD * inverse_D[:, None] * inverse_D[None, :]


def off_diagonal_mass(gram_DD: Tensor) -> float:
    """Sum of |G_pq| over p < q: Chain of Merges' measure of how far a task lies from decorrelated
    features."""
    sums = [rows.abs().sum(dtype=torch.float64) for rows in gram_DD.split(_ROWS)]
    return max(float(sum(sums) - gram_DD.diagonal().abs().sum(dtype=torch.float64)) / 2, 0.0)


_ROWS = 64  # at a time: a copy of the whole would only be fetched from memory again
