"""RegMean (Jin et al., 2023): each linear is the least-squares fit to all experts on their own inputs."""

from __future__ import annotations

from pydantic import Field

from merging.contracts.layer_rule import Chain, Inputs
from merging.layerwise import ShrunkGramMerger
from merging.settings import Settings as BaseSettings


class RegMean(ShrunkGramMerger):
    """Least-squares weights under each expert's own inputs.

    W = (sum_i W_i G_i)(sum_i G_i)^-1, with G_i = E[x x^T] of the unmerged expert's inputs to that linear, per
    token, and its off-diagonal multiplied by `shrink`. Biases, norms and everything else are averaged. Where
    the summed Gram says nothing (dead features, fewer tokens than features at shrink 1), the weight stays at
    the experts' average."""

    paper = "arXiv:2212.09849"
    inputs: Inputs = "expert"
    chain: Chain = "none"

    class Settings(BaseSettings):
        shrink: float = Field(
            0.9,
            ge=0,
            le=1,
            description="Share of each Gram's off-diagonal that is kept (alpha in the paper).",
        )
