"""FeatCal (2026): calibrates a merged model front to back, each block by ridge regression to the experts'
features."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from merging.contracts.layer_rule import Chain, Inputs
from merging.layerwise import LayerwiseCalibrator
from merging.settings import Settings as BaseSettings

if TYPE_CHECKING:
    from torch import Tensor

    from merging.moments import Moments, NormMoments
    from merging.normal_equations import NormalEquations, NormEquations

_STEADYING = 1e-4  # from this ridge on, products in float32 are exact enough
EPSILON = 1e-8  # covariance_eps of the authors' code: floor of the Gram's norm, and an extra diagonal


class FeatCal(LayerwiseCalibrator):
    """Closed-form feature calibration of a merged model, block after block.

    Per linear: min over W of sum_i w_i E‖W x - W_i x_target‖² + λ ‖W - W_anchor‖², where x are the calibrated
    prefix's activations on task i, x_target = α x_expert + (1 - α) x, w_i = 1 / max(‖E[x xᵀ]‖_F, ε) and
    W_anchor = ρ W_merged + (1 - ρ) W_base. Biases follow with the new weight, norms' scales and shifts per
    channel. All modules of a block are solved on one pass, then take effect. Embeddings and what lies outside
    the blocks stay."""

    paper = "arXiv:2605.13030"
    inputs: Inputs = "student"
    chain: Chain = "block"
    targets = True
    reads_out = True

    class Settings(BaseSettings):
        ridge: float = Field(
            0.05,
            ge=0,
            le=1e6,
            description="Pull towards the anchor (lambda), relative to Grams of Frobenius norm 1.",
        )
        interpolation: float = Field(
            0.25, ge=0, le=1, description="Share of the expert's features in the targets (alpha)."
        )
        anchor: float = Field(
            2.2,
            ge=0,
            le=10,
            description="The anchor is anchor · merged + (1 - anchor) · base (rho); above 1 extrapolates.",
        )
        biases: bool = Field(True, description="Calibrate the biases of linears.")
        norms: bool = Field(True, description="Calibrate scales and shifts of norms.")

    @property
    def biases(self) -> bool:  # type: ignore[override]
        return bool(self.settings.biases)

    @property
    def norms(self) -> bool:  # type: ignore[override]
        return bool(self.settings.norms)

    def add(self, equations: NormalEquations, weight_OD: Tensor, moments: Moments) -> None:
        gram_DD = moments.gram_DD
        exact_OD = weight_OD if self.settings.ridge >= _STEADYING else weight_OD.double()
        met_OD = moments.met(exact_OD, share=self.settings.interpolation)
        equations.add_met(met_OD, gram_DD, scale=_task_scale(moments), tokens=moments.tokens)

    def add_bias(
        self, equations: NormalEquations, weight_OD: Tensor, bias_O: Tensor, moments: Moments
    ) -> None:
        alpha = self.settings.interpolation
        mean_D = moments.mean_D
        target_D = moments.target_mean_D * alpha + mean_D * (1 - alpha)
        offset_O = bias_O + weight_OD @ target_D.to(weight_OD)
        equations.add_offset(offset_O, mean_D, scale=_task_scale(moments))

    def solve(self, equations: NormalEquations, merged_OD: Tensor, base_OD: Tensor) -> Tensor:
        return equations.solve(
            ridge=self.settings.ridge, anchor_OD=self._anchor(merged_OD, base_OD), damping=EPSILON
        )

    def solve_bias(
        self, equations: NormalEquations, weight_OD: Tensor, merged_O: Tensor, base_O: Tensor
    ) -> Tensor:
        anchor_O = self._anchor(merged_O, base_O)
        return equations.solve_bias(weight_OD, ridge=self.settings.ridge, anchor_O=anchor_O)

    def add_norm(
        self, equations: NormEquations, scale_D: Tensor, shift_D: Tensor | None, moments: NormMoments
    ) -> None:
        equations.add(scale_D, shift_D, mean_D=moments.mean_D, square_D=moments.square_D)

    def solve_norm(
        self,
        equations: NormEquations,
        merged: tuple[Tensor, Tensor | None],
        base: tuple[Tensor, Tensor | None],
    ) -> tuple[Tensor, Tensor | None]:
        shift_D = None
        if merged[1] is not None and base[1] is not None:
            shift_D = self._anchor(merged[1], base[1])
        return equations.solve(
            ridge=self.settings.ridge,
            anchor_scale_D=self._anchor(merged[0], base[0]),
            anchor_shift_D=shift_D,
            floor=EPSILON,
        )

    def _anchor(self, merged: Tensor, base: Tensor) -> Tensor:
        rho = self.settings.anchor
        return merged * rho + base.to(merged) * (1 - rho)


def _task_scale(moments: Moments) -> float:
    """omega: tasks of large activations must not outweigh the others."""
    return 1.0 / max(moments.gram_norm, EPSILON)
