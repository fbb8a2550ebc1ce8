"""ISO-CTS: an isotropic sum whose least directions give way to those that each task has for itself.

Shape letters: N experts, O outputs and I inputs of a weight.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from merging.matrix_merger import MatrixMerger

if TYPE_CHECKING:
    from torch import Tensor

    from merging.costs.cost import Work


class IsoCts(MatrixMerger):
    """Join leading directions of the summed task vectors with leading directions of each, all of one size.

    U_c: left vectors of the c leading triplets of sum_i T_i; of each (I - U_c U_c^T) T_i the leading
    (min(out, in) - c) / N triplets. All vectors are made orthonormal, all singular values their mean s;
    W = W_0 + scale * s U V^T. Marczak et al., 2025.
    """

    paper = "arXiv:2502.04959"
    memory = "the largest tensor of the base and of each expert in float32, and six of it in float64"

    class Settings(MatrixMerger.Settings):
        common: float = Field(
            0.8,
            ge=0,
            le=1,
            description="Share of the directions that come from the sum (common_space_fraction).",
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

        return [4 * longer * shorter, 8 * longer * shorter, *held_by_decorrelation(longer, shorter)]

    def operations(self, longer: int, shorter: int, experts: int) -> Work:
        from merging.costs.spectral_law import decorrelation, triplets

        return triplets(longer, shorter, shorter) * (experts + 1) + decorrelation(longer, shorter)

    def merge_matrices(self, deltas_NOI: Tensor) -> Tensor:
        from merging.spectral import common_and_specific

        return common_and_specific(deltas_NOI, self.settings.common, cutoff=self.settings.cutoff)
