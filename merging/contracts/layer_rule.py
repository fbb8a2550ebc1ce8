"""LayerRule: the few answers in which RegMean, RegMean++, Chain of Merges and FeatCal differ; `sweep.py` does
the rest.

Shape letters: D inputs, O outputs of a linear (of all linears of one feed, stacked along O).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar, Literal

if TYPE_CHECKING:
    from torch import Tensor

    from merging.moments import Moments, NormMoments
    from merging.normal_equations import NormalEquations, NormEquations

Inputs = Literal["expert", "student", "expert_on_student"]
Chain = Literal["none", "block", "feed"]


class LayerRule(ABC):
    """A rule that solves the linears of each block from statistics of their inputs, front to back.

    `inputs`: whose activations enter the Gram. "expert": the expert walks its own model. "student": the model
    being made walks. "expert_on_student": the expert's block is fed with the student's stream. `chain`: when
    solved weights take effect on later statistics: never, after the block, or after each feed."""

    targets: ClassVar[bool] = (
        False  # True: the expert walks too, and `moments` hold cross moments with its inputs
    )
    biases: bool = False  # whether add_bias and solve_bias are called
    norms: bool = False  # whether add_norm and solve_norm are called
    reads_out: ClassVar[bool] = (
        False  # True: in a last block, tokens that no head reads weigh less (backbone's say)
    )
    unit_tokens: bool = False  # whether each token is scaled to length 1 before it enters the moments

    @property
    @abstractmethod
    def inputs(self) -> Inputs: ...

    @property
    @abstractmethod
    def chain(self) -> Chain: ...

    def at(self, name: str) -> LayerRule:
        """The rule for the linear whose weight the checkpoint calls so: itself, unless settings differ."""
        return self

    @abstractmethod
    def add(self, equations: NormalEquations, weight_OD: Tensor, moments: Moments) -> None:
        """Fold one task into the equations of a feed, given the expert's weight. Both tensors are this
        call's (and `add_bias`'s) alone: their memory serves the next task."""

    @abstractmethod
    def solve(self, equations: NormalEquations, merged_OD: Tensor, base_OD: Tensor) -> Tensor:
        """The new weight (O D), once all tasks are folded in. `merged_OD`: the weight before, `base_OD`: the
        base's."""

    def add_bias(
        self, equations: NormalEquations, weight_OD: Tensor, bias_O: Tensor, moments: Moments
    ) -> None:
        """Fold one task's bias into the equations; called after `add`, where there is a bias."""

    def solve_bias(
        self, equations: NormalEquations, weight_OD: Tensor, merged_O: Tensor, base_O: Tensor
    ) -> Tensor:
        """The new bias, given the new weight."""
        return merged_O

    def add_norm(
        self, equations: NormEquations, scale_D: Tensor, shift_D: Tensor | None, moments: NormMoments
    ) -> None:
        """Fold one task's norm into the equations of the norm."""

    def solve_norm(
        self,
        equations: NormEquations,
        merged: tuple[Tensor, Tensor | None],
        base: tuple[Tensor, Tensor | None],
    ) -> tuple[Tensor, Tensor | None]:
        """The new scale and shift of a norm."""
        return merged
