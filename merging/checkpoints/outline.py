"""Outline: what a model class says of a checkpoint's tensors, kept without the class.

Small enough to be remembered: the libraries that build the class take longer to load than adapters to merge.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from torch import nn

from merging.checkpoints.names import module_names, tie_group

Kind = Literal["linear", "conv1d", "expert", "outputs first", "other"]
"""Of a module: conv1d is GPT-2's linear, whose weight has the inputs first; an expert's linear is a part of a
stack in the model class; outputs are first in what derives from linears, and in fused attention."""


@dataclass(frozen=True)
class Outline:
    """`places`: stored name -> name in the module. `ties`: name in the module -> the one it shares. `fused`:
    stored names that the module holds as parts of other tensors."""

    name: str
    library: str
    modules: Mapping[str, Kind]
    state: tuple[str, ...]
    places: Mapping[str, str]
    ties: Mapping[str, str]
    fused: tuple[str, ...] = ()

    @classmethod
    def of(cls, model: nn.Module, stored: Iterable[str]) -> Outline:
        found = module_names(model, stored)
        return cls(
            type(model).__name__,
            type(model).__module__,
            {name: _kind(module) for name, module in model.named_modules()},
            tuple(model.state_dict()),
            dict(found.renamed),
            dict(found.ties),
            tuple(found.converted),
        )

    def tensors(self, module: str) -> list[str]:
        """All that the module holds, by their names in the model."""
        return [name for name in self.state if name.startswith(f"{module}.")]

    def tied(self, place: str) -> set[str]:
        """All names in the module that share a tensor, the given one among them."""
        return tie_group(place, self.ties)


def _kind(module: nn.Module) -> Kind:
    if type(module) is nn.Linear:
        return "linear"
    if isinstance(module, nn.Linear | nn.MultiheadAttention):
        return "outputs first"
    return "conv1d" if type(module).__name__ == "Conv1D" else "other"
