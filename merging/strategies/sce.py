"""SCE: select the entries on which experts differ most, calculate their weights, erase the minority's sign.

Shape letters: N experts, S the shape of the parameter.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from merging.contracts.merger import TensorMerger
from merging.settings import Scale
from merging.settings import Settings as BaseSettings

if TYPE_CHECKING:
    from torch import Tensor


class Sce(TensorMerger):
    """Keep the entries on which experts differ most, weigh experts by their energy there, merge what agrees.

    Per tensor: t_i = W_i - W_0 at the int(density * n) entries of largest variance over i, of n that vary;
    a_i = mean(t_i^2) / sum_j mean(t_j^2); W = W_0 + scale * sum_A a_i t_i / sum_A a_i, entry by entry, A the
    experts with the sign of sum_i t_i. Wan et al., 2024.
    """

    paper = "arXiv:2408.07990"
    memory = "the largest tensor of the base and of each expert, in float64, three times"
    precision = "float64"
    passes = 12.0

    class Settings(BaseSettings):
        scale: Scale = Field(1.0, description="Weight of the merged task vector.")
        density: float = Field(
            1.0,
            gt=0,
            le=1,
            description="Share kept of the entries that vary, in each tensor (tau, top-k).",
        )

    def arrays(self, experts: int) -> float:
        return 3 * (experts + 1.0)

    def combine(self, name: str, base_S: Tensor, deltas_NS: Tensor) -> Tensor:
        from merging.sparsifying import energy_shares, most_varying
        from merging.task_vectors import disjoint_merge, elect_by_mass, spread

        if self.settings.density < 1:
            deltas_NS = deltas_NS.where(most_varying(deltas_NS, self.settings.density), 0)
        shares_N = energy_shares(deltas_NS)
        sign_S = elect_by_mass(deltas_NS)
        sign_S = sign_S.where(sign_S != 0, 1)
        merged_S = disjoint_merge(deltas_NS * spread(shares_N, deltas_NS), sign_S, shares_N, "mean")
        return base_S + self.settings.scale * merged_S
