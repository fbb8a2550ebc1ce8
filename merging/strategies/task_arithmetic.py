"""Task arithmetic: add the sum of the task vectors to the base.

Shape letters: N experts, S the shape of the parameter.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pydantic import Field

from merging.contracts.merger import TensorMerger
from merging.settings import Scale
from merging.settings import Settings as BaseSettings

if TYPE_CHECKING:
    from torch import Tensor


class TaskArithmetic(TensorMerger):
    """The base plus the scaled sum of the task vectors.

    W = W_0 + scale * sum_i w_i (W_i - W_0). Ilharco et al., 2023.
    """

    paper = "arXiv:2212.04089"
    memory = "a row block of the base and of each expert, in float64; independent of the model's size"
    weighted = True
    linear = True
    elementwise = True
    passes = 3.0
    precision = "float64"

    class Settings(BaseSettings):
        scale: Scale = Field(0.3, description="Weight of the summed task vectors (lambda).")
        normalize: bool = Field(
            False, description="Divide the sum by the sum of the weights; a sum of 0 counts as 1."
        )

    @classmethod
    def coefficients(cls, settings: Any, weights: Mapping[str, float]) -> dict[str, float]:
        total = sum(weights.values()) if settings.normalize else 1.0
        share = settings.scale / (total if abs(total) >= 1e-8 else 1.0)
        return {task: share * weight for task, weight in weights.items()}

    def combine(self, name: str, base_S: Tensor, deltas_NS: Tensor) -> Tensor:
        from merging.task_vectors import onto, weighted_sum

        sum_S = weighted_sum(deltas_NS, self.weights_N)
        if self.settings.normalize:
            total = sum(self.weights_N.tolist())
            sum_S /= total if abs(total) >= 1e-8 else 1
        return onto(base_S, sum_S, self.settings.scale)
