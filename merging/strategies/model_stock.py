"""Model Stock: from the base towards the experts' average, as far as their agreement carries.

Shape letters: N experts, S the shape of the parameter.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from merging.contracts.merger import TensorMerger
from merging.settings import Settings

if TYPE_CHECKING:
    from torch import Tensor


class ModelStock(TensorMerger):
    """Go from the base towards the average of the experts, the further the smaller the angle between them.

    t = N cos theta / (1 + (N - 1) cos theta), theta the mean angle between task vectors of a tensor;
    W = t * mean_i W_i + (1 - t) W_0. Jang et al., 2024.
    """

    paper = "arXiv:2403.19522"
    memory = "the largest tensor of the base and of each expert, in float64, twice"
    precision = "float64"

    class Settings(Settings):
        rows: bool = Field(
            False, description="An angle for each row along the last axis, not one per tensor."
        )
        mean: Literal["cosines", "angles"] = Field(
            "cosines", description="What is averaged over the pairs of experts to get theta."
        )
        clamp: bool = Field(
            True, description="Keep t between 0 and 1; without it, obtuse angles lead away from the experts."
        )

    @classmethod
    def check(cls, settings: Any, weights: Mapping[str, float]) -> list[str]:
        if len(weights) < 2:
            return ["model_stock compares experts with each other, so it takes at least two"]
        return super().check(settings, weights)

    def combine(self, name: str, base_S: Tensor, deltas_NS: Tensor) -> Tensor:
        from merging.spheres import mean_cosine
        from merging.task_vectors import weighted_sum

        cosine = mean_cosine(deltas_NS, rows=self.settings.rows, of=self.settings.mean)
        count = len(deltas_NS)
        t = count * cosine / (1 + (count - 1) * cosine)
        if self.settings.clamp:
            t = t.where(cosine > 0, 0)
        return base_S + t * (weighted_sum(deltas_NS) / count)
