"""Symmetric systems: Cholesky in the matrix's own memory, its condition, a pseudo-inverse where it fails.

Shape letters: D features, O right-hand sides, P and R rows of a panel and below it, K directions kept.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

DTYPE = torch.float64
_PANEL = 192  # columns


class Factor:
    """L of unit = L Lᵀ, with what is left of `unit` above the diagonal."""

    def __init__(self, lower_DD: Tensor, unit_DD: Tensor, heads: Sequence[tuple[int, int, Tensor]]) -> None:
        """`lower_DD`: L, by its lower half. Of `unit_DD`, which may be the same memory, only what lies right
        of the `heads` still counts: the blocks on its diagonal, with the first row and the one after the
        last."""
        self.lower_DD, self._unit_DD, self._heads = lower_DD, unit_DD, heads

    def solved(self, rhs_DO: Tensor) -> Tensor:
        """unit⁻¹ rhs. torch.cholesky_solve would copy the factor each time."""
        inner_DO = torch.linalg.solve_triangular(self.lower_DD, rhs_DO, upper=False)
        return torch.linalg.solve_triangular(self.lower_DD.mT, inner_DO, upper=True)

    def times(self, rhs_DO: Tensor) -> Tensor:
        """unit · rhs."""
        made_DO = torch.zeros_like(rhs_DO)
        for start, stop, head_PP in self._heads:
            right_PR = self._unit_DD[start:stop, stop:]
            made_DO[start:stop] += head_PP @ rhs_DO[start:stop] + right_PR @ rhs_DO[stop:]
            made_DO[stop:] += right_PR.T @ rhs_DO[start:stop]
        return made_DO


def factor_(matrix_DD: Tensor) -> tuple[Factor | None, list[tuple[int, int, Tensor]]]:
    """Cholesky of a symmetric matrix, in its lower half where there are many features; None where it is not
    positive definite. Also the blocks on the diagonal, with which `restore_` makes the matrix again.

    Panel by panel, nearly all of it in matrix products: for many features about twice as fast as LAPACK's,
    which torch calls on a transposed copy."""
    heads: list[tuple[int, int, Tensor]] = []
    if len(matrix_DD) < 2 * _PANEL:
        lower_DD, info = torch.linalg.cholesky_ex(matrix_DD)
        return None if int(info) else Factor(lower_DD, matrix_DD, [(0, len(matrix_DD), matrix_DD)]), heads
    for start in range(0, len(matrix_DD), _PANEL):
        stop = min(start + _PANEL, len(matrix_DD))
        heads.append((start, stop, matrix_DD[start:stop, start:stop].clone()))
        if start:
            done_PK = matrix_DD[start:stop, :start]
            matrix_DD[start:, start:stop].addmm_(matrix_DD[start:, :start], done_PK.T, alpha=-1)
        head_PP, info = torch.linalg.cholesky_ex(matrix_DD[start:stop, start:stop])
        if int(info):
            return None, heads
        matrix_DD[start:stop, start:stop] = head_PP
        below_RP = matrix_DD[stop:, start:stop]
        below_RP.copy_(torch.linalg.solve_triangular(head_PP.mT, below_RP, upper=True, left=False))
    return Factor(matrix_DD, matrix_DD, heads), heads


def restore_(matrix_DD: Tensor, heads: Sequence[tuple[int, int, Tensor]]) -> None:
    """The matrix that `factor_` took, bit for bit."""
    for start, stop, head_PP in heads:
        matrix_DD[start:stop, start:stop] = head_PP
        matrix_DD[stop:, start:stop] = matrix_DD[start:stop, stop:].T


def condition_of(factor: Factor) -> float:
    """Largest over smallest eigenvalue by power iteration on the matrix and on its inverse."""
    features = len(factor.lower_DD)
    steps = 12 if features < 2048 else 6  # each reads two matrices
    start_D1 = (
        torch.ones(features, 1, dtype=DTYPE) + torch.linspace(-0.5, 0.5, features, dtype=DTYPE)[:, None]
    )
    high, low = start_D1, start_D1
    largest = smallest = 1.0
    for _ in range(steps):
        high = factor.times(high / high.norm())
        low = factor.solved(low / low.norm())
        largest, smallest = float(high.norm()), 1.0 / float(low.norm())
    return largest / smallest if smallest > 0 else float("inf")


def pseudo_solve(unit_DD: Tensor, size_D: Tensor, rhs_OD: Tensor, cutoff: float) -> tuple[Tensor, int]:
    """rhs · lhs⁺ for lhs = S · unit · S, without the directions of `unit` below cutoff; how many those are.

    With unit = V Λ Vᵀ over what is kept and S V = Q R, lhs is Q (R Λ Rᵀ) Qᵀ and its Moore-Penrose inverse
    Q R⁻ᵀ Λ⁻¹ R⁻¹ Qᵀ.
    """
    values_D, vectors_DD = torch.linalg.eigh(unit_DD)
    kept = values_D > cutoff * float(values_D.abs().max())
    if not bool(kept.any()):
        return torch.zeros_like(rhs_OD), len(values_D)
    vectors_DK = vectors_DD[:, kept].mul_(size_D[:, None])
    del vectors_DD
    q_DK, r_KK = torch.linalg.qr(vectors_DK)
    del vectors_DK
    inner_KO = torch.linalg.solve_triangular(r_KK, (rhs_OD @ q_DK).T, upper=True) / values_D[kept][:, None]
    solution_OD = torch.linalg.solve_triangular(r_KK.T, inner_KO, upper=False).T @ q_DK.T
    return solution_OD, int((~kept).sum())
