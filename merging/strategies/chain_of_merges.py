"""Chain of Merges (2025): RegMean along the merged model's own activations, each layer seeing the merged ones
before."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from merging.contracts.layer_rule import Chain, Inputs
from merging.layerwise import LayerwiseMerger
from merging.settings import Settings as BaseSettings

if TYPE_CHECKING:
    from torch import Tensor

    from merging.moments import Moments
    from merging.normal_equations import NormalEquations


class ChainOfMerges(LayerwiseMerger):
    """RegMean along the merged model's own activations, normalised, with tasks weighted by feature
    correlation.

    W = (sum_i w_i W_i G_i)(sum_i w_i G_i)^-1, layer after layer. G_i is the Gram of the inputs that the layer
    gets from the layers already merged (`chain`), of tokens scaled to unit length (`normalise`), with its
    off-diagonal shrunk; w_i = sum over p < q of |G_i,pq| (`task_weights`). The system is solved for task
    vectors, by pseudo-inverse where it lacks rank, so directions that no example shows keep the base. Without
    its three parts this is RegMean."""

    paper = "arXiv:2508.21421"
    by_layer = frozenset({"shrink", "ridge"})

    class Settings(BaseSettings):
        chain: Literal["feed", "block", "none"] = Field(
            "feed",
            description="When merged weights take effect: after each group of linears with one input, after "
            "each block, or never (every expert then walks its own model, as in RegMean).",
        )
        normalise: Literal["token", "feature", "none"] = Field(
            "token", description="Which vectors of X are scaled to unit length before the Gram (X tilde)."
        )
        gram: Literal["mean", "sum"] = Field(
            "mean", description="Whether Grams are per token, or sums that favour tasks with more tokens."
        )
        task_weights: bool = Field(True, description="Weigh tasks by their features' correlation (omega).")
        shrink: float = Field(
            0.95,
            ge=0,
            le=1,
            description="Share of each Gram's off-diagonal that is kept; one reading of 0.95.",
        )
        ridge: float = Field(
            0.0,
            ge=0,
            le=1e12,
            description="Tikhonov term on the summed Grams, towards `anchor`; the other reading of 0.95.",
        )
        anchor: Literal["base", "zero"] = Field(
            "base",
            description="Where the ridge and unseen directions pull: to the base's weights, or to zero.",
        )

    @property
    def inputs(self) -> Inputs:
        return "expert" if self.settings.chain == "none" else "student"

    @property
    def chain(self) -> Chain:
        chain: Chain = self.settings.chain
        return chain

    @property
    def unit_tokens(self) -> bool:  # type: ignore[override]
        return bool(self.settings.normalise == "token")

    def add(self, equations: NormalEquations, weight_OD: Tensor, moments: Moments) -> None:
        self.fold(equations, weight_OD, moments)

    def fold(self, equations: NormalEquations, weight_OD: Tensor, moments: Moments) -> float:
        """`add`, returning the task's weight omega."""
        from merging.grams import correlation, off_diagonal_mass

        gram_DD, count = moments.gram_DD, moments.total if self.settings.gram == "sum" else 1.0
        if self.settings.normalise == "feature":
            gram_DD, count = correlation(gram_DD), 1.0
        weight = off_diagonal_mass(gram_DD) * count if self.settings.task_weights else 1.0
        equations.add(
            weight_OD, gram_DD, scale=weight * count, tokens=moments.tokens, shrink=self.settings.shrink
        )
        return weight

    def solve(self, equations: NormalEquations, merged_OD: Tensor, base_OD: Tensor) -> Tensor:
        anchor_OD = base_OD if self.settings.anchor == "base" else None
        return equations.solve(ridge=self.settings.ridge, anchor_OD=anchor_OD)
