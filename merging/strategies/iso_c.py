"""ISO-C: task arithmetic with all singular values of the sum made equal.

Shape letters: N experts, O outputs and I inputs of a weight.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from merging.matrix_merger import MatrixMerger

if TYPE_CHECKING:
    from torch import Tensor

    from merging.costs.cost import Work


class IsoC(MatrixMerger):
    """Add up the task vectors and set all singular values of the sum to their mean.

    sum_i T_i = U diag(s) V^T; W = W_0 + scale * mean(s) U V^T. Marczak et al., 2025.
    """

    paper = "arXiv:2502.04959"
    memory = "the largest tensor of the base and of each expert in float32, and four of it in float64"

    class Settings(MatrixMerger.Settings):
        cutoff: float = Field(
            1e-6,
            ge=0,
            lt=1,
            description="Singular values up to this share of the largest count as zero: they stay zero, "
            "and out of the mean.",
        )

    def held(self, longer: int, shorter: int, experts: int) -> list[int]:
        from merging.costs.spectral_law import held_by_triplets

        return [4 * longer * shorter, *held_by_triplets(longer, shorter), *[8 * longer * shorter] * 2]

    def operations(self, longer: int, shorter: int, experts: int) -> Work:
        from merging.costs.spectral_law import triplets

        return triplets(longer, shorter, shorter)

    def merge_matrices(self, deltas_NOI: Tensor) -> Tensor:
        from merging.spectral import isotropic, rounding_floor
        from merging.task_vectors import weighted_sum

        total_OI = weighted_sum(deltas_NOI)
        return isotropic(total_OI, cutoff=self.settings.cutoff, floor=rounding_floor(deltas_NOI))
