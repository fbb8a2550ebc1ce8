"""Karcher mean: the mean of the experts' directions on the sphere.

Shape letters: N experts, S the shape of the parameter.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pydantic import Field

from merging.contracts.merger import TensorMerger
from merging.settings import Settings

if TYPE_CHECKING:
    from torch import Tensor


class Karcher(TensorMerger):
    """The mean of the experts on the sphere, tensor by tensor, with the mean of their lengths.

    W = (sum_i w_i |W_i|) u, u = argmin over unit tensors of sum_i w_i angle(u, W_i)^2, weights summing to 1.
    Karcher, 1977.
    """

    paper = "doi:10.1002/cpa.3160300502"
    needs = frozenset()
    memory = "the largest tensor of each expert, in float64, three times"
    weighted = True
    precision = "float64"
    differences = False

    class Settings(Settings):
        iterations: int = Field(10, ge=1, description="Steps of the iteration at most.")
        tolerance: float = Field(1e-5, gt=0, description="The iteration ends with a step shorter than this.")

    @classmethod
    def check(cls, settings: Any, weights: Mapping[str, float]) -> list[str]:
        if min(weights.values()) < 0 or sum(weights.values()) == 0:
            return ["the weights must not be negative, nor all 0"]
        return []

    def combine(self, name: str, base_S: Tensor, experts_NS: Tensor) -> Tensor:
        from merging.spheres import karcher_mean

        if len(experts_NS) == 1:
            return experts_NS[0]
        return karcher_mean(
            experts_NS,
            self.weights_N,
            iterations=self.settings.iterations,
            tolerance=self.settings.tolerance,
        )
