"""How far a merged adapter is from the mean of the adapters' updates.

`python -m benchmarks.adapter_error MERGED ADAPTER...` prints the relative error (Frobenius, over all
linears). Imports torch, so `lora` runs it as a process of its own.

Shape letters: O outputs, I inputs of a linear.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor


def error(merged: Path, adapters: Sequence[Path]) -> float:
    found, parts = updates(merged), [updates(adapter) for adapter in adapters]
    squared = size = 0.0
    for module, first_OI in parts[0].items():
        wanted_OI = sum((part[module] for part in parts[1:]), first_OI) / len(parts)
        squared += float((found[module] - wanted_OI).square().sum())
        size += float(wanted_OI.square().sum())
    return (squared / size) ** 0.5


def updates(adapter: Path) -> dict[str, Tensor]:
    """Module -> alpha / rank · B A, in float64."""
    config = json.loads((adapter / "adapter_config.json").read_text(encoding="utf-8"))
    factors = load_file(adapter / "adapter_model.safetensors")
    rank, alpha = (
        _by_module(config, key) for key in (("r", "rank_pattern"), ("lora_alpha", "alpha_pattern"))
    )
    found = {}
    for name, down_RI in factors.items():
        if name.endswith(".lora_A.weight"):
            module = name.removesuffix(".lora_A.weight")
            up_OR = factors[f"{module}.lora_B.weight"].double()
            found[module] = (alpha(module) / rank(module)) * (up_OR @ down_RI.double())
    return found


def _by_module(config: Mapping[str, Any], keys: tuple[str, str]) -> Callable[[str], float]:
    """Of a module: what a pattern says of it, else what holds for all."""
    plain, patterns = config[keys[0]], config.get(keys[1]) or {}
    return lambda module: next((value for end, value in patterns.items() if module.endswith(end)), plain)


def main(words: Sequence[str]) -> None:
    print(error(Path(words[0]), [Path(word) for word in words[1:]]))


if __name__ == "__main__":
    main(sys.argv[1:])
