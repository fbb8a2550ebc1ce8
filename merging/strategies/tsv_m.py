"""TSV-M: the leading singular vectors of every task, made orthogonal to each other before they are added up.

Shape letters: N experts, O outputs and I inputs of a weight.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from merging.matrix_merger import MatrixMerger

if TYPE_CHECKING:
    from torch import Tensor

    from merging.costs.cost import Work


class TsvM(MatrixMerger):
    """Keep the leading singular vectors of each task vector, and add them up after decorrelating the tasks.

    T_i ~ U_i S_i V_i^T, k = min(out, in) / N triplets each; U_perp and V_perp are the orthonormal matrices
    nearest to [U_1 .. U_N] and [V_1 .. V_N]; W = W_0 + scale * U_perp diag(S_1 .. S_N) V_perp^T.
    Gargiulo et al., 2024.
    """

    paper = "arXiv:2412.00081"
    memory = "the largest tensor of the base and of each expert in float32, and four of it in float64"

    class Settings(MatrixMerger.Settings):
        share: float | None = Field(
            None,
            gt=0,
            le=1,
            description="Share of its singular triplets that each task keeps, at least one; null is 1/N, "
            "as published.",
        )
        cutoff: float = Field(
            1e-6,
            ge=0,
            lt=1,
            description="Singular values up to this share of the largest count as zero; their vectors are "
            "dropped.",
        )

    def held(self, longer: int, shorter: int, experts: int) -> list[int]:
        from merging.costs.spectral_law import held_by_decorrelation

        return held_by_decorrelation(longer, shorter)

    def operations(self, longer: int, shorter: int, experts: int) -> Work:
        from merging.costs.spectral_law import decorrelation, triplets

        each = triplets(longer, shorter, max(1, shorter // experts))
        return each * experts + decorrelation(longer, shorter)

    def merge_matrices(self, deltas_NOI: Tensor) -> Tensor:
        from merging.spectral import task_singular_vectors

        share, size = self.settings.share, min(deltas_NOI.shape[1:])
        rank = size // len(deltas_NOI) if share is None else int(size * share)
        return task_singular_vectors(deltas_NOI, max(rank, 1), cutoff=self.settings.cutoff)
