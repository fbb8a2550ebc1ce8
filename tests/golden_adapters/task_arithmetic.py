"""Task arithmetic: fusion_bench's single coefficient, mergekit's weights and `lambda`."""

from __future__ import annotations

from typing import Any

from torch import Tensor

import merging
from golden_adapters.expressing import NotExpressible, named, refuse_unknown, resolve


def task_arithmetic(case: dict[str, Any], tensors: dict[str, Tensor]) -> dict[str, Any]:
    params, inputs = case["params"], resolve(case["inputs"], tensors)
    if "scaling_factor" in params:
        refuse_unknown(params, "scaling_factor")
        merged = merging.merge(
            "task_arithmetic", inputs["base"], named(inputs["experts"]), scale=params["scaling_factor"]
        )
        return {"merged": merged}
    refuse_unknown(params, "weights", "density", "normalize", "rescale", "lambda", "int8_mask")
    if params.get("density", 1.0) != 1.0:
        raise NotExpressible("task arithmetic keeps every entry; density must be 1")
    merged = merging.merge(
        "task_arithmetic",
        inputs["base"],
        named(inputs["experts"]),
        weights=named(params["weights"]),
        scale=params.get("lambda", 1.0),
        normalize=params.get("normalize", False),
    )
    return {"merged": merged}
