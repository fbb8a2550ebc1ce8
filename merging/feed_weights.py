"""FeedWeights: the weights of all linears that share one input, as one matrix.

Shape letters: D inputs, O outputs of a feed's linears, one after another.
"""

from __future__ import annotations

from typing import TypeAlias

import torch
from torch import Tensor, nn

from merging.checkpoints.source import CheckpointSource
from merging.measuring import NormKind
from merging.streaming import StreamedModel
from merging.tracer import Block, Feed, is_transposed

Stacked: TypeAlias = tuple[Tensor, Tensor | None]
"""Weights of a feed's linears along O, and biases, where any has one."""


class FeedWeights:
    """Reads them from checkpoints, by the names that a model's tensors have there; outputs come first."""

    def __init__(self, model: StreamedModel) -> None:
        self._stored = model.stored

    def of(self, source: CheckpointSource, block: Block, feed: Feed) -> Stacked:
        """Weights in float32 or wider; biases too (zeros where a linear has none), None where none has."""
        weights, biases, any_bias = [], [], False
        for linear in feed.linears:
            name = f"{block.name}.{linear}"
            weight = _wide(source.read(self._stored[f"{name}.weight"]))
            weights.append(weight.T if is_transposed(block.module.get_submodule(linear)) else weight)
            stored = self._stored.get(f"{name}.bias")
            any_bias = any_bias or stored is not None
            biases.append(_wide(source.read(stored)) if stored else weights[-1].new_zeros(len(weights[-1])))
        return torch.cat(weights), torch.cat(biases) if any_bias else None

    def in_memory(self, source: CheckpointSource, block: Block, feed: Feed) -> Stacked | None:
        """The same, from a block that was loaded from `source`; None where that has more digits."""
        linears = [
            linear
            for name in feed.linears
            if type(linear := block.module.get_submodule(name)) is nn.Linear
            and self._has_all_digits(linear.weight, f"{block.name}.{name}.weight", source)
        ]
        if len(linears) < len(feed.linears):
            return None
        weights = [linear.weight.detach() for linear in linears]
        bias_O = None
        if any(linear.bias is not None for linear in linears):
            biases: list[Tensor] = [
                linear.weight.new_zeros(len(linear.weight)) if linear.bias is None else linear.bias
                for linear in linears
            ]
            bias_O = torch.cat(biases)
        return weights[0] if len(weights) == 1 else torch.cat(weights), bias_O

    def norm(
        self, source: CheckpointSource, block: Block, name: str, kind: NormKind
    ) -> tuple[Tensor, Tensor | None]:
        """Scale as it multiplies the normalised input, and shift."""
        path = f"{block.name}.{name}"
        scale = _wide(source.read(self._stored[f"{path}.weight"])) + kind.offset
        shift = self._stored.get(f"{path}.bias")
        return scale, _wide(source.read(shift)) if shift else None

    def _has_all_digits(self, weight: Tensor, name: str, source: CheckpointSource) -> bool:
        stored = self._stored.get(name)
        return stored is not None and _wide_dtype(source.spec(stored).dtype) == weight.dtype


def outputs(block: Block, feed: Feed) -> int:
    """O."""
    return sum(outputs_of(block.module, linear) for linear in feed.linears)


def outputs_of(module: nn.Module, linear: str) -> int:
    """Of one linear."""
    part = module.get_submodule(linear)
    return int(part.get_parameter("weight").shape[1 if is_transposed(part) else 0])


def answers(block: Block, feed: Feed) -> int:
    """The feed's outputs, if they are fewer than its inputs, else 0: then the expert's answers take less to
    multiply with the student's inputs than the expert's inputs do."""
    linears = [block.module.get_submodule(linear) for linear in feed.linears]
    count = outputs(block, feed)
    return count if count < feed.features and all(type(one) is nn.Linear for one in linears) else 0


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(_wide_dtype(tensor.dtype))


def _wide_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32
