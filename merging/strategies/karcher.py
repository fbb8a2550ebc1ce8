"""Karcher mean: the mean of the experts' directions on the sphere.

Shape letters: N experts, S the shape of the parameter.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pydantic import Field

from merging.settings import Settings as BaseSettings
from merging.settings import Steps
from merging.span_merger import SpanMerger

if TYPE_CHECKING:
    from torch import Tensor


class Karcher(SpanMerger):
    """The mean of the experts on the sphere, tensor by tensor, with the mean of their lengths.

    W = (sum_i w_i |W_i|) u, u = argmin over unit tensors of sum_i w_i angle(u, W_i)^2, weights summing to 1.
    Karcher, 1977.
    """

    paper = "doi:10.1002/cpa.3160300502"
    needs = frozenset()
    memory = "a row block of each model, in float64, and up to 32 blocks as stored; whatever the model's size"
    weighted = True
    differences = False

    class Settings(BaseSettings):
        iterations: Steps = Field(10, description="Steps of the iteration at most.")
        tolerance: float = Field(
            1e-5, gt=0, le=1, description="The iteration ends with a step shorter than this."
        )

    @classmethod
    def check(cls, settings: Any, weights: Mapping[str, float]) -> list[str]:
        if min(weights.values()) < 0 or sum(weights.values()) == 0:
            return ["the weights must not be negative, nor all 0"]
        return []

    def factors(self, products_MM: Tensor) -> Tensor:
        from merging.spheres import karcher_factors

        if len(products_MM) == 1:
            return products_MM.new_ones(1)
        return karcher_factors(
            products_MM,
            self.weights_N,
            iterations=self.settings.iterations,
            tolerance=self.settings.tolerance,
        )
