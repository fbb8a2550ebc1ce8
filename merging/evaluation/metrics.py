"""Metrics: from predicted and true classes to one number, the higher the better.

Shape letters: B examples.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from merging.errors import SpecError
from merging.registry import did_you_mean


def accuracy(predicted_B: Tensor, true_B: Tensor) -> float:
    """Share of examples whose class is right."""
    return (predicted_B == true_B).double().mean().item()


METRICS: Mapping[str, Callable[[Tensor, Tensor], float]] = {"accuracy": accuracy}


def metric(name: str) -> Callable[[Tensor, Tensor], float]:
    """The metric of that name. Raises SpecError with the nearest valid name."""
    if name not in METRICS:
        raise SpecError(f'unknown metric "{name}"', remedy=did_you_mean(name, METRICS))
    return METRICS[name]
