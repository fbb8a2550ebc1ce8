"""frechet: how far apart two sets of tokens are as distributions, whichever token belongs to which.

Shape letters: N tokens, D features, K the smaller of both.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def frechet(ours_ND: Tensor, theirs_ND: Tensor) -> float:
    """2-Wasserstein distance between the Gaussians with the means and covariances (over N) of both sets:

        W2^2 = |mu_a - mu_b|^2 + tr(C_a + C_b - 2 (C_b^1/2 C_a C_b^1/2)^1/2)

    The trace of the root is the nuclear norm of A B^T / N for any roots A^T A = N C_a, B^T B = N C_b: the
    centred tokens themselves, or their triangular factors where there are more tokens than features. So no
    root of a matrix is taken, and covariances of low rank are as good as any. In float64, in the features'
    units; what its rounding cannot tell from 0 is 0.
    """
    ours_ND, theirs_ND = ours_ND.double(), theirs_ND.double()
    means = ours_ND.mean(0), theirs_ND.mean(0)
    a_KD, b_KD = _root(ours_ND - means[0]), _root(theirs_ND - means[1])
    spread = (a_KD.square().sum() / len(ours_ND) + b_KD.square().sum() / len(theirs_ND)).item()
    scale = math.sqrt(len(ours_ND) * len(theirs_ND))
    common = torch.linalg.svdvals(a_KD @ b_KD.T).sum().item() / scale
    moved = (means[0] - means[1]).square().sum().item()
    between = max(0.0, spread - 2 * common)
    resolution = torch.finfo(torch.float64).eps * 8 * max(a_KD.shape) * spread
    return math.sqrt(moved + (between if between > resolution else 0.0))


def _root(centred_ND: Tensor) -> Tensor:
    """A matrix with the same inner products of features, and no more rows than features."""
    if len(centred_ND) <= centred_ND.shape[1]:
        return centred_ND
    factor: Tensor = torch.linalg.qr(centred_ND, mode="r").R
    return factor
