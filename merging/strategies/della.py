"""DELLA: drop entries at random, the smaller of a row the likelier, then elect signs and merge.

Shape letters: N experts, S the shape of the parameter.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from merging.contracts.merger import TensorMerger
from merging.settings import Scale
from merging.settings import Settings as BaseSettings

if TYPE_CHECKING:
    from torch import Tensor


class Della(TensorMerger):
    """Drop entries at random, the larger of a row less often; rescale, elect signs, merge what agrees.

    p_keep = density - epsilon + 2 epsilon (r - 1) / (n - 1) for the r-th smallest of the n entries of a row;
    t_i = m_i (W_i - W_0) / p_keep; then signs and merge as in TIES. Deep et al., 2024.
    """

    paper = "arXiv:2406.11617"
    memory = "the largest tensor of the base and of each expert, in float64, five times"
    weighted = True
    precision = "float64"
    passes = 60.0

    class Settings(BaseSettings):
        scale: Scale = Field(1.0, description="Weight of the merged task vector (lambda).")
        density: float = Field(0.5, gt=0, le=1, description="Mean share of entries kept (1 - p).")
        epsilon: float = Field(
            0.15,
            ge=0,
            lt=0.5,
            description="How far the probability of being kept is from the density at the ends of a row.",
        )
        rescale: Literal["expectation", "norm", "none"] = Field(
            "expectation",
            description="What is kept is divided by its probability, scaled to each tensor's L1 norm from "
            "before the drop, or left as it is.",
        )
        elect: bool = Field(True, description="Merge only entries of the elected sign, as in TIES; else all.")
        normalize: bool = Field(True, description="Divide by the weights of the entries that are merged.")

    @classmethod
    def check(cls, settings: Any, weights: Mapping[str, float]) -> list[str]:
        low, high = settings.density - settings.epsilon, settings.density + settings.epsilon
        if settings.density < 1 and not (low > 0 and high < 1):
            return [f"density - epsilon = {low:g} and density + epsilon = {high:g} must lie between 0 and 1"]
        return []

    def arrays(self, experts: int) -> float:
        return 5 * (experts + 1.0)

    def combine(self, name: str, base_S: Tensor, deltas_NS: Tensor) -> Tensor:
        from merging.sparsifying import combined, drop_, rank_probabilities

        settings = self.settings
        if settings.density < 1:
            probability_NS = rank_probabilities(deltas_NS, settings.density, settings.epsilon)
            keep_NS = self.uniforms(name, deltas_NS) < probability_NS
            deltas_NS = drop_(deltas_NS, keep_NS, probability_NS, settings.rescale)
        merged_S = combined(deltas_NS, self.weights_N, elect=settings.elect, normalize=settings.normalize)
        return base_S + settings.scale * merged_S
