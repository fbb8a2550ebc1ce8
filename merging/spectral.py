"""Singular triplets of task vectors by way of the small Gram, and what TSV-M, ISO-C and ISO-CTS make of them.

Everything is computed in float64. The Gram on the shorter side squares the singular values, which costs half
of the digits: those down to about 1e-7 of the largest remain, and so all above the rounding of float32.

Shape letters: N experts, O outputs and I inputs of a weight; R the shorter of the two sides, L the longer
one, C a chunk of it; K singular triplets.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from merging.task_vectors import weighted_sum

_CHUNK = 4096  # along the longer side: what is copied to float64 at a time
_STRIPES = 4  # of a Gram; only blocks on and below the diagonal are computed


class Triplets(NamedTuple):
    """Singular values in falling order, with their vectors as columns."""

    left_OK: Tensor
    values_K: Tensor
    right_IK: Tensor


def leading_triplets(matrix_OI: Tensor, count: int, *, cutoff: float, floor: float = 0.0) -> Triplets:
    """The `count` largest singular triplets, less those not above `floor` or `cutoff` times the largest.

    The vectors of vanishing singular values are arbitrary, so a matrix of low rank has fewer triplets.
    """
    values_K, short_RK = _short_spectrum(matrix_OI, count, cutoff=cutoff, floor=floor)
    if matrix_OI.shape[0] <= matrix_OI.shape[1]:
        return Triplets(short_RK, values_K, _product(matrix_OI.T, short_RK / values_K))
    return Triplets(_product(matrix_OI, short_RK / values_K), values_K, short_RK)


def isotropic(matrix_OI: Tensor, *, cutoff: float, floor: float = 0.0) -> Tensor:
    """U mean(s) V^T of U diag(s) V^T, over the directions which the matrix has; their nuclear norm stays."""
    values_K, short_RK = _short_spectrum(matrix_OI, min(matrix_OI.shape), cutoff=cutoff, floor=floor)
    if not len(values_K):
        return torch.zeros_like(matrix_OI)
    flattening_RR = (short_RK * (values_K.mean() / values_K)) @ short_RK.T
    if matrix_OI.shape[0] <= matrix_OI.shape[1]:
        return _product(matrix_OI.T, flattening_RR).T
    return _product(matrix_OI, flattening_RR)


def task_singular_vectors(deltas_NOI: Tensor, rank: int, *, cutoff: float) -> Tensor:
    """TSV-M: the `rank` leading triplets of every task vector, decorrelated between tasks and added up."""
    return decorrelated([leading_triplets(delta, rank, cutoff=cutoff) for delta in deltas_NOI], cutoff=cutoff)


def common_and_specific(deltas_NOI: Tensor, fraction: float, *, cutoff: float) -> Tensor:
    """ISO-CTS: leading triplets of the sum, and of each task vector outside their left space, in one size."""
    total_OI = weighted_sum(deltas_NOI)
    specific = specific_rank(min(total_OI.shape), len(deltas_NOI), fraction)
    common = leading_triplets(
        total_OI,
        min(total_OI.shape) - len(deltas_NOI) * specific,
        cutoff=cutoff,
        floor=rounding_floor(deltas_NOI),
    )
    parts = [common]
    for delta_OI in deltas_NOI if specific else ():
        outside_OI = delta_OI - common.left_OK @ (common.left_OK.T @ delta_OI.to(torch.float64))
        floor = cutoff * float(delta_OI.norm())  # below this, what the projection left over is rounding
        parts.append(leading_triplets(outside_OI, specific, cutoff=cutoff, floor=floor))
    values_K = torch.cat([part.values_K for part in parts])
    mean = float(values_K.mean()) if len(values_K) else 0.0
    flat = [part._replace(values_K=torch.full_like(part.values_K, mean)) for part in parts]
    return decorrelated(flat, cutoff=cutoff)


def specific_rank(size: int, experts: int, fraction: float) -> int:
    """How many of `size` triplets each task gets for itself, so that about `fraction` of them are common."""
    wanted = round((size - int(size * fraction)) / experts)
    return min(wanted, size // experts)  # rounding up must not leave a negative number of common ones


def decorrelated(parts: Sequence[Triplets], *, cutoff: float) -> Tensor:
    """U_perp diag(s) V_perp^T: the orthonormal matrices nearest to all left and to all right vectors.

    With G = U^T U, U_perp = U G^(-1/2). Of linearly dependent vectors, the directions that they lack are left
    out of G^(-1/2): n copies of a vector then share its place, 1/sqrt(n) each.
    """
    left_OK = torch.cat([part.left_OK for part in parts], dim=1)
    right_IK = torch.cat([part.right_IK for part in parts], dim=1)
    values_K = torch.cat([part.values_K for part in parts])
    core_KK = (_inverse_root(left_OK, cutoff) * values_K) @ _inverse_root(right_IK, cutoff)
    if len(left_OK) <= len(right_IK):
        return (left_OK @ core_KK) @ right_IK.T
    return left_OK @ (core_KK @ right_IK.T)


def rounding_floor(deltas_NOI: Tensor) -> float:
    """What may be left where task vectors cancel: rounding, relative to the largest of them."""
    largest = max(float(delta_OI.norm()) for delta_OI in deltas_NOI)
    return torch.finfo(deltas_NOI.dtype).eps * largest


def _inverse_root(vectors_LK: Tensor, cutoff: float) -> Tensor:
    """(V^T V)^(-1/2) within the span of V; for more vectors than dimensions too."""
    squares_K, axes_KK = torch.linalg.eigh(_lower_gram(vectors_LK.T))
    kept_K = squares_K > _squared(cutoff, len(squares_K)) * squares_K[-1:]
    axes_KK = axes_KK[:, kept_K]
    return (axes_KK * squares_K[kept_K].rsqrt()) @ axes_KK.T


def _short_spectrum(matrix_OI: Tensor, count: int, *, cutoff: float, floor: float) -> tuple[Tensor, Tensor]:
    """Leading singular values in falling order, and their vectors on the shorter side."""
    short_RL = matrix_OI if matrix_OI.shape[0] <= matrix_OI.shape[1] else matrix_OI.T
    squares_R, axes_RR = torch.linalg.eigh(_lower_gram(short_RL))
    squares_K, axes_RK = squares_R.flip(0)[:count], axes_RR.flip(1)[:, :count]
    least = max(floor**2, _squared(cutoff, len(squares_R)) * float(squares_R[-1]))
    kept = int((squares_K > least).sum())
    return squares_K[:kept].sqrt(), axes_RK[:, :kept]


def _squared(cutoff: float, size: int) -> float:
    """The cut-off for eigenvalues of a Gram, not below what eigh can tell from zero."""
    return max(cutoff**2, size * torch.finfo(torch.float64).eps)


def _lower_gram(short_RL: Tensor) -> Tensor:
    """X X^T in float64; what lies above the diagonal blocks stays zero, and eigh does not look there."""
    size = len(short_RL)
    gram_RR = torch.zeros(size, size, dtype=torch.float64, device=short_RL.device)
    step = max(1, math.ceil(size / _STRIPES))
    for part_RC in short_RL.split(_CHUNK, dim=1):
        wide_RC = part_RC.to(torch.float64)
        for start in range(0, size, step):
            stripe = slice(start, start + step)
            gram_RR[start:, stripe] += wide_RC[start:] @ wide_RC[stripe].T
    return gram_RR


def _product(long_LR: Tensor, small_RK: Tensor) -> Tensor:
    """A product in float64 of a matrix that may be stored in less."""
    return torch.cat([part_CR.to(torch.float64) @ small_RK for part_CR in long_LR.split(_CHUNK)])
