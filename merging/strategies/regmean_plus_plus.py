"""RegMean++ (Nguyen et al., 2025): RegMean with inputs that come through the already merged blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from merging.contracts.layer_rule import Chain, Inputs
from merging.layerwise import LayerwiseMerger
from merging.settings import Settings as BaseSettings

if TYPE_CHECKING:
    from torch import Tensor

    from merging.moments import Moments
    from merging.normal_equations import NormalEquations


class RegMeanPlusPlus(LayerwiseMerger):
    """RegMean, with each expert's block fed by the merged blocks before it.

    G_i is measured inside expert i's block, whose input is the merged prefix's output on task i's examples;
    the block is solved as in RegMean, and takes effect before the next one. What is not a linear is averaged.
    """

    paper = "arXiv:2508.03121"
    by_layer = frozenset({"shrink"})
    inputs: Inputs = "expert_on_student"
    chain: Chain = "block"

    class Settings(BaseSettings):
        shrink: float = Field(
            0.95,
            ge=0,
            le=1,
            description="Share of each Gram's off-diagonal that is kept (alpha in the paper).",
        )

    def add(self, equations: NormalEquations, weight_OD: Tensor, moments: Moments) -> None:
        from merging.grams import shrink_off_diagonal

        gram_DD = shrink_off_diagonal(moments.gram_DD, self.settings.shrink)
        equations.add(weight_OD, gram_DD, tokens=moments.tokens)

    def solve(self, equations: NormalEquations, merged_OD: Tensor, base_OD: Tensor) -> Tensor:
        return equations.solve(anchor_OD=merged_OD)
