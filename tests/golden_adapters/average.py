"""Averages: MergeLM's plain mean and mergekit's `linear`."""

from __future__ import annotations

from typing import Any

from torch import Tensor

import merging
from golden_adapters.expressing import named, refuse_unknown, resolve


def simple_average(case: dict[str, Any], tensors: dict[str, Tensor]) -> dict[str, Any]:
    refuse_unknown(case["params"])
    inputs = resolve(case["inputs"], tensors)
    return {"merged": merging.merge("average", inputs["base"], named(inputs["experts"]))}


def linear(case: dict[str, Any], tensors: dict[str, Tensor]) -> dict[str, Any]:
    params, inputs = case["params"], resolve(case["inputs"], tensors)
    refuse_unknown(params, "weights", "normalize")
    merged = merging.merge(
        "average",
        inputs["base"],
        named(inputs["experts"]),
        weights=named(params["weights"]),
        normalize=params.get("normalize", True),
    )
    return {"merged": merged}
