"""What PEFT makes of linears in mixtures of experts, which checkpoints store one by one and classes stacked.

PEFT (0.21) reads factors of single experts for some architectures: by the last part of a module's name,
whatever the module is, and with the rank of the whole adapter. For others it leaves them out, without a word.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from torch import nn

from merging.checkpoints.outline import Kind, Outline

# Last parts of names that PEFT takes for those of stacked experts and of routers, by the architecture whose
# layout a mixture follows.
TAKEN = {
    "mixtral": frozenset({"gate", "w1", "w2", "w3"}),
    "qwen2_moe": frozenset({"gate", "gate_proj", "up_proj", "down_proj"}),
}


def outline_for_peft(model: nn.Module, stored: Iterable[str]) -> Outline:
    """Of a class as PEFT sees it: experts are linears where it reads their factors, else parts of a stack.

    Other linears that it would take for experts, shared ones say, are none that could have factors."""
    from merging.backbones.routed_experts import fused_experts, split_experts_

    stored = tuple(stored)
    taken = _taken(model)
    fused = fused_experts(model) if taken else {}
    fused = {path: names for path, names in fused.items() if {names.gate, names.up, names.down} <= taken}
    if fused and not any(name.endswith("experts.gate_up_proj") for name in stored):
        split_experts_(model, fused)
    else:
        fused = {}
    experts = tuple(f"{path}." for path in fused)
    outline = Outline.of(model, stored)
    kinds: dict[str, Kind] = dict(outline.modules)
    for name, kind in outline.modules.items():
        if kind != "linear":
            continue
        if experts and name.startswith(experts):
            kinds[name] = "expert"
        elif name.rpartition(".")[2] in taken:
            kinds[name] = "outputs first"
    return replace(outline, modules=kinds)


def _taken(model: nn.Module) -> frozenset[str]:
    """Empty where PEFT takes names as they are."""
    from transformers.conversion_mapping import (
        _MODEL_TO_CONVERSION_PATTERN,  # what PEFT asks, too
        get_checkpoint_conversion_mapping,
    )

    kind = getattr(getattr(model, "config", None), "model_type", "")
    if get_checkpoint_conversion_mapping(kind) is None:
        return frozenset()
    layout = "mixtral" if kind == "mixtral" else _MODEL_TO_CONVERSION_PATTERN.get(kind, "")
    return TAKEN.get(layout, frozenset())
