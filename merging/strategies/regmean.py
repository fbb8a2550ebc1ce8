"""RegMean (Jin et al., 2023): each linear is the least-squares fit to all experts on their own inputs."""

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


class RegMean(LayerwiseMerger):
    """Least-squares weights under each expert's own inputs.

    W = (sum_i W_i G_i)(sum_i G_i)^-1, with G_i = E[x x^T] of the unmerged expert's inputs to that linear, per
    token, and its off-diagonal multiplied by `shrink`. Biases, norms and everything else are averaged. Where
    the summed Gram says nothing (dead features, fewer tokens than features at shrink 1), the weight stays at
    the experts' average."""

    paper = "arXiv:2212.09849"
    by_layer = frozenset({"shrink"})
    inputs: Inputs = "expert"
    chain: Chain = "none"

    class Settings(BaseSettings):
        shrink: float = Field(
            0.9,
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
