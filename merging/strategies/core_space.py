"""Core Space: adapters are brought into small square matrices between two shared bases, and merged there.

Shape letters: N experts, O outputs and I inputs of a weight, R rank, K and L the sizes of the two bases.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pydantic import Field

from merging.settings import Scale
from merging.shared_space import SharedSpaceMerger, Space
from merging.spec.component import Component, InnerRule
from merging.strategies.tsv_m import TsvM

if TYPE_CHECKING:
    from torch import Tensor

    from merging.low_rank import LowRank


class CoreSpace(SharedSpaceMerger):
    """Project all adapters between bases of their stacked factors, and merge the small cores by another rule.

    T_i = B_i A_i = U M_i V^T, U the left singular vectors of [B_1 .. B_N] and V the right ones of the stacked
    A_i; W = W_0 + scale * U * inner(M_1, .., M_N) * V^T, weight by weight. Panariello et al., 2025.
    """

    paper = "arXiv:2509.17786"
    memory = "the largest adapted weight three times in float64, and cores of (sum of all ranks)^2"
    by_layer = SharedSpaceMerger.by_layer | {"isotropize"}

    class Settings(SharedSpaceMerger.Settings):
        scale: Scale = Field(0.2, description="Weight of the merged task vectors.")
        inner: InnerRule = Field(
            Component(type="tsv_m", settings=TsvM.Settings.model_validate({})),
            description="The rule that merges the cores: its name, or an object with its settings. Its own "
            "scale multiplies this one.",
        )
        isotropize: bool = Field(
            False,
            description="Set all singular values of a merged core to their mean; zeros stay zero.",
        )

    def space(self, terms: Sequence[LowRank]) -> Space:
        from merging.low_rank import row_basis

        left_OK = row_basis([term.scaled_left() for term in terms])
        right_IL = row_basis([term.right_RI.T for term in terms])
        cores = [(left_OK.T @ term.scaled_left()) @ (term.right_RI.double() @ right_IL) for term in terms]
        return Space(left_OK, cores, right_IL.T)

    def refined(self, name: str, merged_KL: Tensor) -> Tensor:
        from merging.spectral import isotropic

        if not self.settings_for(name).isotropize or not merged_KL.numel():
            return merged_KL
        return isotropic(merged_KL, cutoff=1e-6)
