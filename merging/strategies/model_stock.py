"""Model Stock: from the base towards the experts' average, as far as their agreement carries.

Shape letters: N experts, S the shape of the parameter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from merging.settings import Settings as BaseSettings
from merging.span_merger import SpanMerger

if TYPE_CHECKING:
    from torch import Tensor


class ModelStock(SpanMerger):
    """Go from the base towards the average of the experts, the further the smaller the angle between them.

    t = N cos theta / (1 + (N - 1) cos theta), theta the mean angle between task vectors of a tensor;
    W = t * mean_i W_i + (1 - t) W_0. Jang et al., 2024.
    """

    paper = "arXiv:2403.19522"
    memory = "a row block of each model, in float64, and up to 32 blocks as stored; whatever the model's size"

    class Settings(BaseSettings):
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

    def factors(self, products_MM: Tensor) -> Tensor:
        """The base's share is what the others leave."""
        count = len(products_MM)
        return (self._interpolation(products_MM) / count).expand(count)

    def survey(self, name: str) -> None:
        if not self._by_rows(self.vectors.shape(name)):
            super().survey(name)

    def combine(self, name: str, base_S: Tensor, deltas_NS: Tensor) -> Tensor:
        from merging.spheres import row_products
        from merging.task_vectors import weighted_sum

        if not self._by_rows(base_S.shape):
            return super().combine(name, base_S, deltas_NS)
        t = self._interpolation(row_products(deltas_NS))[..., None]
        return base_S + t * (weighted_sum(deltas_NS) / len(deltas_NS))

    def _by_rows(self, shape: Sequence[int]) -> bool:
        return self.settings.rows and len(shape) > 1

    def _interpolation(self, products: Tensor) -> Tensor:
        from merging.spheres import mean_cosine

        cosine = mean_cosine(products, self.settings.mean)
        count = len(products)
        t = count * cosine / (1 + (count - 1) * cosine)
        return t.where(cosine > 0, 0) if self.settings.clamp else t
