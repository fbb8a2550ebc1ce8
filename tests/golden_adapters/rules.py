"""Running a rule of this package on a case whose random draw is given."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from golden_adapters.expressing import named
from merging.checkpoints.sink import StateDictSink
from merging.checkpoints.source import StateDictSource
from merging.contracts.merger import TensorMerger
from merging.contracts.models import Models

State = dict[str, Tensor]


def run(rule: TensorMerger, inputs: dict[str, Any], weights: list[float] | None = None) -> State:
    experts = named(inputs["experts"])
    models = Models(
        StateDictSource(inputs["base"]),
        {name: StateDictSource(expert) for name, expert in experts.items()},
        named(weights) if weights is not None else dict.fromkeys(experts, 1.0),
    )
    sink = StateDictSink(models.base)
    with sink:
        rule.merge(models, None, sink)
    return sink.tensors


def drawn_from(
    rule: type[TensorMerger], uniforms: Callable[[str, int], Tensor], **settings: Any
) -> TensorMerger:
    """The rule, with given uniforms (by tensor and expert) in place of its own."""

    class Given(rule):  # type: ignore[misc, valid-type]
        def draws(self, name: str, deltas_NS: Tensor, probability: float) -> Tensor:
            return self.uniforms(name, deltas_NS) < probability

        def uniforms(self, name: str, deltas_NS: Tensor) -> Tensor:
            drawn = [uniforms(name, i).to(deltas_NS.dtype) for i in range(len(deltas_NS))]
            block = slice(self.vectors.offset, self.vectors.offset + deltas_NS[0].numel())
            return torch.stack([u.flatten()[block].view(deltas_NS.shape[1:]) for u in drawn])

    Given.name = rule.name
    return Given(rule.Settings(**settings))


def from_masks(inputs: dict[str, Any]) -> Callable[[str, int], Tensor]:
    """Uniforms below any density where a mask keeps, above any where it drops; no mask keeps everything."""

    def uniforms(name: str, expert: int) -> Tensor:
        masks = inputs["keep_masks"][expert]
        keep_S = masks[name] if name in masks else torch.ones_like(inputs["base"][name])
        return 1.0 - keep_S.double()

    return uniforms
