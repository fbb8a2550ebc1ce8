"""split_weights: stored tensors that transformers cuts into several weights as it loads a model."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from merging.checkpoints.names import converters_of, module_names
from merging.contracts.backbone import Location


def split_weights(model: nn.Module, names: Iterable[str]) -> dict[str, Location]:
    """Weight of the model -> the rows in which it lies, for stored tensors that are cut along their rows into
    equal parts (DINOv2's SwiGLU: gate and up projection in one)."""
    cuts = [list(one.target_patterns) for one in converters_of(model) if _cuts_rows(one)]
    if not cuts:
        return {}
    state, places = model.state_dict(), {}
    for stored, first in module_names(model, names).converted.items():
        targets = next((found for found in cuts if found[0] in first), [])
        parts = [first.replace(targets[0], target, 1) for target in targets]
        if not parts or not all(part in state for part in parts):
            continue
        start = 0
        for part in parts:
            stop = start + len(state[part])
            places[part] = Location(stored, slice(start, stop))
            start = stop
    return places


def _cuts_rows(converter: Any) -> bool:
    if len(converter.operations) != 1 or len(converter.source_patterns) != 1:
        return False
    one = converter.operations[0]
    cuts = type(one).__name__ == "Chunk" and one.dim == 0
    by_config = getattr(one, "num_shards_attribute", None) is not None
    return cuts and not by_config and len(converter.target_patterns) > 1
