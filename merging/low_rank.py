"""Matrices of low rank as products of two thin ones, and the bases that several of them share.

Shape letters: N experts, O rows, I columns (all axes but the first, flattened), R rank, K size of a shared basis.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class LowRank(NamedTuple):
    """scale * left @ right. Rank 0 is the zero matrix."""

    left_OR: Tensor
    right_RI: Tensor
    scale: float = 1.0

    @property
    def rank(self) -> int:
        return self.left_OR.shape[1]

    def product(self, rows: slice | None = None) -> Tensor:
        """The matrix, or those of its rows, in float64."""
        left_OR = self.left_OR if rows is None else self.left_OR[rows]
        return (left_OR.double() * self.scale) @ self.right_RI.double()

    def scaled_left(self) -> Tensor:
        return self.left_OR.double() * self.scale


def zero(rows: int, columns: int) -> LowRank:
    """The zero matrix, at no cost."""
    return LowRank(torch.zeros(rows, 0), torch.zeros(0, columns))


def factored(matrix_OI: Tensor, *, noise: float = 0.0) -> LowRank:
    """The shortest form: singular values up to `noise`, or lost in rounding, are left out."""
    left_OK, values_K, right_KI = torch.linalg.svd(matrix_OI.double(), full_matrices=False)
    largest = float(values_K[0]) if len(values_K) else 0.0
    rounding = largest * max(matrix_OI.shape) * torch.finfo(torch.float64).eps
    rank = int((values_K > max(noise, rounding)).sum())
    return LowRank(left_OK[:, :rank] * values_K[:rank], right_KI[:rank])


def side_by_side(terms: Sequence[LowRank], *, floor: float) -> Tensor:
    """Left singular vectors (O K) of [T_1 ... T_N], of singular values above `floor`; no product is formed.

    With Q R = [B_1 ... B_N] and Q_i R_i = A_i^T they are Q u, where u S v^T = R diag(R_1^T, ..., R_N^T).
    """
    frame_OK, triangle_KR = torch.linalg.qr(torch.cat([term.scaled_left() for term in terms], dim=1))
    heights = [torch.linalg.qr(term.right_RI.double().T).R.T for term in terms]
    u_KK, values_K, _ = torch.linalg.svd(triangle_KR @ torch.block_diag(*heights), full_matrices=False)
    return frame_OK @ u_KK[:, values_K > floor]


def row_basis(matrices_OR: Sequence[Tensor]) -> Tensor:
    """Left singular vectors (O K) of the matrices side by side, K = min(O, sum of R)."""
    return torch.linalg.svd(torch.cat(list(matrices_OR), dim=1).double(), full_matrices=False)[0]


def levelled(matrix: Tensor) -> Tensor:
    """The matrix with all singular values set to their mean."""
    u, values, vh = torch.linalg.svd(matrix, full_matrices=False)
    return values.mean() * (u @ vh)
