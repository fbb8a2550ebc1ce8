"""Kinds of numbers: real ones are merged, integers and booleans stay the base's, the rest is refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from merging.arguments import found
from merging.checkpoints.quantised import refuse_quantised
from merging.checkpoints.source import StateDictSource
from merging.errors import CheckpointError, Problem

if TYPE_CHECKING:
    from merging.contracts.models import Models

_SHOWN = 10  # problems of one model


def is_whole(dtype: torch.dtype) -> bool:
    """Whether these are integers or booleans, of which the base's are kept, whatever experts have."""
    return not (dtype.is_floating_point or dtype.is_complex)


def tensors_source(tensors: Mapping[str, Tensor] | nn.Module, label: str) -> StateDictSource:
    """A mapping or module as a checkpoint. Raises CheckpointError naming what is no ordinary tensor in it, or
    packed, as in a folder."""
    held = tensors.state_dict() if isinstance(tensors, nn.Module) else tensors
    problems = [
        Problem(f"{label}: {name}", what, remedy)
        for name, value in held.items()
        for what, remedy in _unfit(name, value)
    ]
    if problems:
        more = f", the first {_SHOWN} of {len(problems)}" if len(problems) > _SHOWN else ""
        raise CheckpointError(f"{label} holds what cannot be merged{more}", problems=problems[:_SHOWN])
    source = StateDictSource(held, label)
    refuse_quantised(source, None)
    return source


def refuse_complex(models: Models) -> None:
    """Raise CheckpointError for tensors of complex numbers, which no rule merges, where experts have others
    than the base: these would be lost."""
    problems = []
    for name in models.base.names():
        spec = models.base.spec(name)
        if not spec.dtype.is_complex or name in models.kept:
            continue
        for expert in models.experts.values():
            if expert.spec(name) == spec and _equal(models.base.read(name), expert.read(name)):
                continue
            short = str(spec.dtype).removeprefix("torch.")
            what = f"{short} in the base, with other values here: complex numbers are not merged"
            problems.append(Problem(f"{expert.label}: {name}", what))
    if problems:
        raise CheckpointError(
            "tensors of complex numbers differ from the base's",
            problems=problems,
            remedy="Store real and imaginary parts as two tensors, or give the expert the base's own.",
        )


def _equal(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.cpu(), other.cpu())


def _unfit(name: object, value: object) -> list[tuple[str, str]]:
    """What is wrong with an entry of a state dict, and what to do."""
    if not isinstance(name, str) or not name:
        return [(f"found {found(name)} as a name, expected text", "")]
    if not isinstance(value, Tensor):
        return [(f"found {found(value)}, expected a tensor", "Leave it out, or make it a tensor.")]
    if is_lazy(value):
        return [("has no shape yet", "Run the module once before it is merged.")]
    if value.is_meta:
        return [("has no values: it is on the meta device", "Load the weights first.")]
    if value.is_quantized:
        return [
            (f"is quantised, as {str(value.dtype).removeprefix('torch.')}", "Merge what it was made from.")
        ]
    if value.is_nested or value.layout != torch.strided:
        kind = "nested" if value.is_nested else str(value.layout).removeprefix("torch.")
        return [(f"is no dense tensor, but {kind}", "Give its to_dense().")]
    return []
