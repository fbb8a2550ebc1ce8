"""WUDI: data-free descent on the interference between the merged task vector and each task's.

Shape letters: N experts, O outputs and I inputs of a weight.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from merging.matrix_merger import MatrixMerger
from merging.settings import Rate

if TYPE_CHECKING:
    from torch import Tensor

    from merging.costs.cost import Work

OUTSIDE = (
    "embed",
    "wte.weight",
    "wpe.weight",
    "shared.weight",
    "relative_attention_bias",
    "projection",
    "visual.proj",
    "lm_head",
    "classifier",
)
"""Names of matrices outside attention and MLPs, in the families of models that transformers has."""


class Wudi(MatrixMerger):
    """Start from the sum of the task vectors, and take steps of Adam against its interference with each.

    min over T of sum_i ||(T - T_i) T_i^T||^2 / ||T_i||^2, a linear's inputs being taken to lie in the row
    space of its task vector; W = W_0 + scale * T. The number of steps is part of the method.
    Cheng et al., 2025.
    """

    paper = "arXiv:2503.08099"
    memory = "the largest tensor of the base and of each expert, seven more and two of in², in float32"

    class Settings(MatrixMerger.Settings):
        steps: int = Field(300, ge=0, le=1_000_000, description="Steps of Adam (iter_num).")
        learning_rate: Rate = Field(
            1e-5,
            description="Of Adam: about what an entry can move in one step, in units of the weights.",
        )
        others: Literal["mean", "base"] = Field(
            "base",
            description="What becomes of tensors that are no matrices: the mean of the task vectors is added "
            "to the base, or they stay the base's.",
        )
        skip: tuple[str, ...] = Field(
            OUTSIDE, description="Matrices with one of these in their name are treated as the others are."
        )

    def held(self, longer: int, shorter: int, experts: int) -> list[int]:
        return [*[4 * longer * shorter] * 7, *[4 * shorter * shorter] * 2]

    def operations(self, longer: int, shorter: int, experts: int) -> Work:
        from merging.costs.cost import Work

        return Work(single=(2.0 * self.settings.steps + 4.0 * experts) * longer * shorter * shorter)

    def merge_matrices(self, deltas_NOI: Tensor) -> Tensor:
        import torch

        from merging.task_vectors import weighted_sum

        sum_OI = weighted_sum(deltas_NOI)
        pull_II, excess_OI = _interference(sum_OI, deltas_NOI)
        moved_OI = torch.zeros_like(sum_OI, memory_format=torch.contiguous_format)
        # The fused step is the fastest one, and heeds no strides.
        optimizer = torch.optim.Adam([moved_OI], lr=self.settings.learning_rate, fused=True)
        for _ in range(self.settings.steps):
            moved_OI.grad = torch.addmm(excess_OI, moved_OI, pull_II, beta=2, alpha=2)
            optimizer.step()
        return sum_OI + moved_OI.detach()


def _interference(sum_OI: Tensor, deltas_NOI: Tensor) -> tuple[Tensor, Tensor]:
    """H and R of the gradient 2 (R + D H) at sum + D: with U_i = T_i / ||T_i||, sums of U_i^T U_i and of
    (sum - T_i) U_i^T U_i.

    A task vector of zeros interferes with nothing.
    """
    import torch

    pull_II = deltas_NOI.new_zeros(deltas_NOI.shape[2], deltas_NOI.shape[2])
    excess_OI = torch.zeros_like(sum_OI, memory_format=torch.contiguous_format)
    for delta_OI in deltas_NOI:
        norm = float(torch.linalg.vector_norm(delta_OI, dtype=torch.float64))
        if norm > 0:
            unit_OI = delta_OI / norm
            gram_II = unit_OI.T @ unit_OI
            pull_II += gram_II
            excess_OI.addmm_(sum_OI - delta_OI, gram_II)
    return pull_II, excess_OI
