"""The diagonal Fisher information of a classifier, and the mean that is weighted by it.

Shape letters: N experts, S the shape of a parameter, B examples, C classes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from merging.task_vectors import spread, weighted_sum


class DiagonalFisher:
    """Sums for F = E_x E_{y ~ p(y|x)} (d log p(y|x) / dW)^2, entry by entry, over the examples added."""

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        """`parameters`: leaves that require gradients."""
        self._parameters = dict(parameters)
        self._sums = {name: torch.zeros_like(leaf.detach()) for name, leaf in parameters.items()}
        self._examples = 0

    def add_example(self, scores_C: Tensor) -> None:
        """Exactly: one backward pass per class, each weighed with the model's own probability of it."""
        log_C = scores_C.log_softmax(dim=-1)
        for label, probability in enumerate(log_C.detach().exp().tolist()):
            if probability:
                self._add_square(log_C[label], probability)
        self._examples += 1

    def add_batch(self, scores_BC: Tensor) -> None:
        """As the published PyTorch ports do: the square of the gradient of sum_bc sqrt(p) log p.

        One backward pass per batch; cross terms between examples and classes stay in the square.
        """
        log_BC = scores_BC.log_softmax(dim=-1)
        self._add_square((log_BC.detach().exp().sqrt() * log_BC).sum(), 1.0)
        self._examples += len(scores_BC)

    def mean(self) -> dict[str, Tensor]:
        """Parameter -> its diagonal; ends the sums."""
        return {name: sum_S.div_(max(self._examples, 1)) for name, sum_S in self._sums.items()}

    def _add_square(self, value: Tensor, weight: float) -> None:
        leaves = list(self._parameters.values())
        gradients = torch.autograd.grad(value, leaves, retain_graph=True, allow_unused=True)
        for name, gradient_S in zip(self._parameters, gradients, strict=True):
            if gradient_S is not None:
                self._sums[name].addcmul_(gradient_S, gradient_S, value=weight)


def floored(values: Tensor, floor: float, by: Literal["max", "add"]) -> Tensor:
    """At least `floor`, or all raised by it."""
    return values.clamp(min=floor) if by == "max" else values + floor


def fisher_mean(
    experts_NS: Tensor,
    fishers_NS: Tensor,
    weights_N: Tensor,
    *,
    floor: float,
    by: Literal["max", "add"],
    only: int | None = None,
) -> Tensor:
    """sum_i w_i F_i W_i / sum_i w_i F_i, entry by entry; F is floored for all experts, or for number `only`.

    Where all F_i are 0 and none is floored, the weighted mean.
    """
    floored_NS = floored(fishers_NS, floor, by)
    if only is not None:
        floored_NS = torch.cat([fishers_NS[:only], floored_NS[only : only + 1], fishers_NS[only + 1 :]])
    shares_NS = floored_NS * spread(weights_N, floored_NS)
    total_S = weighted_sum(shares_NS)
    empty_S = total_S == 0
    if bool(empty_S.any()):
        shares_NS = torch.where(empty_S, spread(weights_N, shares_NS), shares_NS)
        total_S = weighted_sum(shares_NS)
    # As differences from the first, so that equal experts give back their own bits.
    return experts_NS[0] + weighted_sum(shares_NS * (experts_NS - experts_NS[0])) / total_S
