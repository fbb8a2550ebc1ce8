"""Learning coefficients of task vectors by making predictions surer: entropy, its gradient, and the descent.

Shape letters: L rows of coefficients (one per tensor, or one in all), N experts, S the shape of a parameter,
B examples, C classes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

Loss = Callable[[Mapping[str, Tensor]], Tensor]
"""The loss on one batch as a function of the model's weights."""


@dataclass(frozen=True)
class DescentStep:
    """One step of Adam: loss and gradient before the update, the coefficients after it, as they are used."""

    loss: float
    gradient_LN: Tensor
    coefficients_LN: Tensor


class MergedModel:
    """Weights W_l = W_0l + sum_i c_li T_li as a function of the coefficients, with the gradient of a loss."""

    def __init__(
        self,
        fixed: Mapping[str, Tensor],
        base: Mapping[str, Tensor],
        deltas: Mapping[str, Tensor],
        rows: Mapping[str, int],
    ) -> None:
        """`fixed`: what is not merged; `base` and `deltas` (N S): what is; `rows`: the l of each tensor."""
        self._fixed, self._base, self._deltas, self._rows = dict(fixed), base, deltas, rows

    def gradient(self, coefficients_LN: Tensor, losses: Iterable[Loss]) -> tuple[float, Tensor]:
        """The summed losses and their gradient: <dloss/dW_l, T_li>, summed over the tensors of a row.

        The merged weights are made once, and each loss is walked back before the next, so that memory holds
        one merged model, one gradient, and the activations of one batch.
        """
        leaves = {
            name: (base_S + _combined(self._deltas[name], coefficients_LN[self._rows[name]])).requires_grad_()
            for name, base_S in self._base.items()
        }
        total = 0.0
        with torch.enable_grad():
            for loss_of in losses:
                loss = loss_of({**self._fixed, **leaves})
                loss.backward()
                total += loss.item()
        gradient_LN = torch.zeros_like(coefficients_LN)
        for name, leaf_S in leaves.items():
            if leaf_S.grad is not None:
                inner_N = self._deltas[name].flatten(1) @ leaf_S.grad.flatten()
                gradient_LN[self._rows[name]] += inner_N.to(gradient_LN)
        return total, gradient_LN


def entropy(scores_BC: Tensor) -> Tensor:
    """Mean over examples of -sum_c p log p."""
    log_BC = scores_BC.log_softmax(dim=-1)
    return -(log_BC.exp() * log_BC).sum(dim=-1).mean()


def descend(
    start_LN: Tensor,
    gradient_of: Callable[[Tensor], tuple[float, Tensor]],
    *,
    steps: int,
    learning_rate: float,
    clamp: bool,
) -> Iterator[DescentStep]:
    """Adam. With `clamp`, clamp(c, 0, 1) is used: beyond the ends no gradient reaches a coefficient."""
    raw_LN = start_LN.clone().requires_grad_()
    adam = torch.optim.Adam([raw_LN], lr=learning_rate)
    for _ in range(steps):
        with torch.enable_grad():
            used_LN = raw_LN.clamp(0, 1) if clamp else raw_LN * 1
        loss, gradient_LN = gradient_of(used_LN.detach())
        adam.zero_grad()
        used_LN.backward(gradient_LN)
        assert raw_LN.grad is not None
        gradient_LN = raw_LN.grad.clone()
        adam.step()
        after_LN = raw_LN.detach().clone()
        yield DescentStep(loss, gradient_LN, after_LN.clamp(0, 1) if clamp else after_LN)


def _combined(deltas_NS: Tensor, coefficients_N: Tensor) -> Tensor:
    return torch.tensordot(coefficients_N.to(deltas_NS), deltas_NS, dims=1)
