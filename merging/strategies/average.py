"""Average: the weighted mean of the experts.

Shape letters: N experts, S the shape of the parameter.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pydantic import Field

from merging.contracts.merger import TensorMerger
from merging.settings import Settings as BaseSettings

if TYPE_CHECKING:
    from torch import Tensor


class Average(TensorMerger):
    """The weighted mean of the experts (model soup).

    W = sum_i w_i W_i / sum_i w_i; with `normalize` off, W = sum_i w_i W_i. The base counts only where it is
    listed as an expert. Wortsman et al., 2022.
    """

    paper = "arXiv:2203.05482"
    needs = frozenset()
    memory = "a row block of each expert, in float64; independent of the model's size"
    weighted = True
    linear = True
    elementwise = True
    passes = 2.0
    precision = "float64"
    differences = False

    class Settings(BaseSettings):
        normalize: bool = Field(
            True, description="Divide by the sum of the weights (w_i), which must not be 0."
        )

    @classmethod
    def check(cls, settings: Any, weights: Mapping[str, float]) -> list[str]:
        if settings.normalize and abs(sum(weights.values())) < 1e-8:
            return [
                'the weights sum to 0, so they have no mean; change a "weight", or set "normalize" to false'
            ]
        return []

    @classmethod
    def coefficients(cls, settings: Any, weights: Mapping[str, float]) -> dict[str, float]:
        total = sum(weights.values()) if settings.normalize else 1.0
        return {task: weight / total for task, weight in weights.items()}

    def combine(self, name: str, base_S: Tensor, experts_NS: Tensor) -> Tensor:
        from merging.task_vectors import weighted_sum

        divisor = sum(self.weights_N.tolist()) if self.settings.normalize else 1
        return weighted_sum(experts_NS, self.weights_N, divisor)
