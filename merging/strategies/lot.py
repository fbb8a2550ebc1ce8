"""LOT Merging: task vectors merged layer by layer so that the features of each expert drift least.

Shape letters: D inputs, O outputs of a linear.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from merging.contracts.layer_rule import Chain, Inputs
from merging.contracts.merger import MergeNotes
from merging.contracts.method import Progress, silent
from merging.layerwise import LayerwiseMerger
from merging.settings import Scale
from merging.settings import Settings as BaseSettings

if TYPE_CHECKING:
    from torch import Tensor

    from merging.checkpoints.sink import CheckpointSink
    from merging.contracts.models import Models
    from merging.data.task import CalibrationData
    from merging.moments import Moments, NormMoments
    from merging.normal_equations import NormalEquations, NormEquations


class Lot(LayerwiseMerger):
    """The task vector of each linear and norm that moves the experts' features least, on their own inputs.

    Linears: min over T of sum_i ||X_i (T - T_i)^T||^2, so T = (sum_i T_i G_i)(sum_i G_i)^+, G_i = X_i^T X_i
    of the unmerged expert; W = W_0 + scale * T, and directions that no example shows keep the base. Scales of
    norms: the mean of the experts', channel by channel by their energy. Everything else: the mean.
    Sun et al., 2025.
    """

    paper = "arXiv:2505.23859"
    inputs: Inputs = "expert"
    chain: Chain = "none"

    class Settings(BaseSettings):
        scale: Scale = Field(1.0, description="Weight of the merged task vectors, all of them (lambda).")
        gram: Literal["sum", "mean"] = Field(
            "sum",
            description="Whether a task counts by its tokens (sum), or every task alike (mean per token).",
        )
        norms: bool = Field(
            True, description="Merge the scales of norms by energy; if not, they are averaged."
        )

    @property
    def norms(self) -> bool:  # type: ignore[override]
        return bool(self.settings.norms)

    def merge(
        self,
        models: Models,
        data: CalibrationData | None,
        sink: CheckpointSink,
        *,
        progress: Progress = silent,
    ) -> MergeNotes:
        from merging.scaling import ScaledSink

        scaled = ScaledSink(sink, models.base, self.settings.scale)
        return super().merge(models, data, scaled, progress=progress)

    def add(self, equations: NormalEquations, weight_OD: Tensor, moments: Moments) -> None:
        count = self._count(moments.total)
        equations.add(weight_OD, moments.gram_DD, scale=count, tokens=moments.tokens)

    def solve(self, equations: NormalEquations, merged_OD: Tensor, base_OD: Tensor) -> Tensor:
        return equations.solve(anchor_OD=base_OD)

    def add_norm(
        self, equations: NormEquations, scale_D: Tensor, shift_D: Tensor | None, moments: NormMoments
    ) -> None:
        count = self._count(moments.total)
        equations.add(scale_D, None, mean_D=moments.mean_D * count, square_D=moments.square_D * count)

    def solve_norm(
        self,
        equations: NormEquations,
        merged: tuple[Tensor, Tensor | None],
        base: tuple[Tensor, Tensor | None],
    ) -> tuple[Tensor, Tensor | None]:
        energy_D = equations.square_D
        mean_D = equations.rhs_scale_D / energy_D.where(energy_D > 0, 1)
        return mean_D.where(energy_D > 0, base[0].to(mean_D)), merged[1]

    def _count(self, tokens: float) -> float:
        return tokens if self.settings.gram == "sum" else 1.0
