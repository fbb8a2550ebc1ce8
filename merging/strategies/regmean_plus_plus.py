"""RegMean++ (Nguyen et al., 2025): RegMean with inputs that come through the already merged blocks."""

from __future__ import annotations

from pydantic import Field

from merging.contracts.layer_rule import Chain, Inputs
from merging.layerwise import ShrunkGramMerger
from merging.settings import Settings as BaseSettings


class RegMeanPlusPlus(ShrunkGramMerger):
    """RegMean, with each expert's block fed by the merged blocks before it.

    G_i is measured inside expert i's block, whose input is the merged prefix's output on task i's examples;
    the block is solved as in RegMean, and takes effect before the next one. What is not a linear is averaged.
    """

    paper = "arXiv:2508.03121"
    inputs: Inputs = "expert_on_student"
    chain: Chain = "block"

    class Settings(BaseSettings):
        shrink: float = Field(
            0.95,
            ge=0,
            le=1,
            description="Share of each Gram's off-diagonal that is kept (alpha in the paper).",
        )
