"""Matrices of low rank as products of two thin ones, and the bases that several of them share.

Shape letters: N experts, O rows, I columns (all axes but the first, flattened), R rank, K size of a basis.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

_SMALL = 1024  # up to here a whole SVD costs little
_EXTRA, _PASSES = 16, 4  # of a randomised SVD


class LowRank(NamedTuple):
    """scale * left @ right. Rank 0 is the zero matrix."""

    left_OR: Tensor
    right_RI: Tensor
    scale: float = 1.0

    @property
    def rank(self) -> int:
        return self.left_OR.shape[1]

    @property
    def transposed(self) -> LowRank:
        return LowRank(self.right_RI.T, self.left_OR.T, self.scale)

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


def summed(terms: Sequence[LowRank], coefficients: Sequence[float]) -> LowRank:
    """sum_n coefficients[n] * terms[n], of the sum of their ranks; no product is formed."""
    lefts = [factor * term.scaled_left() for term, factor in zip(terms, coefficients, strict=True)]
    return LowRank(torch.cat(lefts, dim=1), torch.cat([term.right_RI.double() for term in terms]))


def norm(terms: Sequence[LowRank]) -> float:
    """Frobenius norm of the sum of the terms, through the triangles of their factors."""
    whole = summed(terms, [1.0] * len(terms))
    if not whole.rank:
        return 0.0
    left_KR = torch.linalg.qr(whole.left_OR, mode="r").R
    right_KR = torch.linalg.qr(whole.right_RI.T, mode="r").R
    return float(torch.linalg.matrix_norm(left_KR @ right_KR.T))


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


def shortened(
    matrix_OI: Tensor, rank: int | None, *, within: Sequence[Tensor] = (), noise: float = 0.0
) -> LowRank:
    """The nearest matrix of that rank, split evenly between the factors; None: the rank it has above `noise`.

    `within`: matrices (O R) that may span all columns. Where they do, or where the matrix is small, the
    result is exact; else it comes from a randomised SVD, and the caller measures what is lost.
    """
    matrix_OI = matrix_OI.double()
    frame_OK = _frame(matrix_OI, within, rank)
    core_KI = matrix_OI if frame_OK is None else frame_OK.T @ matrix_OI
    return _cut(core_KI, rank, noise, left=frame_OK)


def shortened_product(term: LowRank, rank: int | None, *, noise: float = 0.0) -> LowRank:
    """What `shortened` makes of the term's product, which is not formed: an SVD of the triangles' product."""
    left_OK, left_KR = torch.linalg.qr(term.scaled_left())
    right_IK, right_KR = torch.linalg.qr(term.right_RI.double().T)
    return _cut(left_KR @ right_KR.T, rank, noise, left=left_OK, right=right_IK)


def _cut(
    core_KK: Tensor,
    rank: int | None,
    noise: float,
    *,
    left: Tensor | None = None,
    right: Tensor | None = None,
) -> LowRank:
    """The leading singular triplets of left @ core @ right^T, split evenly between the factors."""
    u_KR, values_R, vh_RK = torch.linalg.svd(core_KK, full_matrices=False)
    least = noise if rank is None else 1e-12  # beyond that, directions are arbitrary
    kept = min(int((values_R > least * values_R[:1]).sum()), len(values_R) if rank is None else rank)
    roots_R = values_R[:kept].sqrt()
    left_OR = u_KR[:, :kept] if left is None else left @ u_KR[:, :kept]
    right_RI = vh_RK[:kept] if right is None else vh_RK[:kept] @ right.T
    return LowRank(left_OR * roots_R, roots_R[:, None] * right_RI)


def _frame(matrix_OI: Tensor, within: Sequence[Tensor], rank: int | None) -> Tensor | None:
    """Orthonormal columns between which the SVD is taken; None: all of them."""
    size = min(matrix_OI.shape)
    if within and sum(part.shape[1] for part in within) < size:
        frame_OK = torch.linalg.qr(torch.cat([part.double() for part in within], dim=1)).Q
        lost = matrix_OI - frame_OK @ (frame_OK.T @ matrix_OI)
        if float(lost.norm()) <= 1e-9 * float(matrix_OI.norm()):
            return frame_OK
    if rank is None or size <= _SMALL or 2 * (rank + _EXTRA) >= size:
        return None
    generator = torch.Generator().manual_seed(0)
    probes_IK = torch.randn(matrix_OI.shape[1], rank + _EXTRA, dtype=torch.float64, generator=generator)
    frame_OK = torch.linalg.qr(matrix_OI @ probes_IK).Q
    for _ in range(_PASSES):
        frame_OK = torch.linalg.qr(matrix_OI @ torch.linalg.qr(matrix_OI.T @ frame_OK).Q).Q
    return frame_OK
