"""Refusing packed weights: numbers that mean nothing without their scales cannot be averaged."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from merging.checkpoints.source import CheckpointSource
from merging.errors import CheckpointError

_NEVER_PACKED = {torch.bool, torch.int64}  # masks, positions, counters
_PACKED_NAMES = (
    "weight",
    "qweight",
    "qzeros",
    "weight_packed",
    "absmax",
    "SCB",
    "quant_map",
    "blocks",
    "W_q",
    "_data",
)
QUANTISED_KEYS = ("quantization_config", "compression_config")
"""Of config.json, by which transformers takes a checkpoint for a quantised one."""


def refuse_quantised(source: CheckpointSource, config: Mapping[str, Any] | None) -> tuple[str, ...]:
    """Raises CheckpointError naming format and tensor; a note if only the config says quantised."""
    settings = next((config[key] for key in QUANTISED_KEYS if config and config.get(key)), None)
    for name in source.names():
        dtype = source.spec(name).dtype
        is_float8 = dtype.is_floating_point and dtype.itemsize == 1
        is_integer = not dtype.is_floating_point and not dtype.is_complex and dtype not in _NEVER_PACKED
        packed_name = name.rpartition(".")[2].endswith(_PACKED_NAMES)
        if is_float8 or (is_integer and (settings is not None or packed_name)):
            raise CheckpointError(
                f"{source.label} is quantised ({_format(settings)}): "
                f'"{name}" is stored as {str(dtype).removeprefix("torch.")}',
                remedy="Use the checkpoint in float32, float16 or bfloat16 from which it was made.",
            )
    if settings is not None:
        return (
            f"{source.label}: its config says quantised ({_format(settings)}), its weights are not: they are "
            "read as they are, and results are not marked as quantised",
        )
    return ()


def _format(settings: Any) -> str:
    if not isinstance(settings, Mapping):
        return "format not named"
    method = str(settings.get("quant_method") or "format not named")
    bits = settings.get("bits") or (
        4 if settings.get("load_in_4bit") else 8 if settings.get("load_in_8bit") else None
    )
    return f"{method}, {bits} bits" if bits else method
