"""Model Breadcrumbs: leave out the largest and the smallest entries of the task vectors, add up the rest.

Shape letters: N experts, S the shape of the parameter.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from merging.contracts.merger import TensorMerger
from merging.settings import Settings

if TYPE_CHECKING:
    from torch import Tensor


class Breadcrumbs(TensorMerger):
    """Leave out the largest and the smallest entries of each task vector, and add the rest to the base.

    Of the n entries of a tensor the int(gamma n) largest go, then the smallest until int(density n) are left:
    t_i; W = W_0 + scale * sum_i w_i t_i. Davari and Belilovsky, 2023.
    """

    paper = "arXiv:2312.06795"
    memory = "the largest tensor of the base and of each expert, in float64, three times"
    weighted = True
    precision = "float64"
    passes = 30.0

    class Settings(Settings):
        scale: float = Field(0.3, description="Weight of the summed task vectors (alpha).")
        density: float = Field(
            0.9, gt=0, le=1, description="Share of entries of each tensor kept (1 - beta)."
        )
        gamma: float = Field(0.01, ge=0, lt=1, description="Share of entries dropped as the largest (gamma).")
        elect: bool = Field(
            False, description="Merge only entries of the elected sign, as in TIES; else all."
        )
        normalize: bool = Field(False, description="Divide by the weights of the entries that are merged.")

    def arrays(self, experts: int) -> float:
        return 3 * (experts + 1.0)

    def combine(self, name: str, base_S: Tensor, deltas_NS: Tensor) -> Tensor:
        import torch

        from merging.sparsifying import combined, without_outliers

        settings = self.settings
        kept = [without_outliers(delta_S, settings.density, settings.gamma) for delta_S in deltas_NS]
        merged_S = combined(
            torch.stack(kept), self.weights_N, elect=settings.elect, normalize=settings.normalize
        )
        return base_S + settings.scale * merged_S
