"""SLERP, the Karcher mean and Model Stock."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import merging
from golden_adapters.expressing import NotExpressible, named, refuse_unknown, resolve


def slerp(case: dict[str, Any], tensors: dict[str, Tensor]) -> dict[str, Any]:
    params, inputs = case["params"], resolve(case["inputs"], tensors)
    refuse_unknown(params, "t", "dot_threshold", "eps")
    if params.get("eps", 1e-8) != 1e-8:
        raise NotExpressible("the norm below which a tensor has no direction is fixed at 1e-8")
    single = isinstance(inputs["a"], Tensor)
    a, b = ({"w": inputs["a"]}, {"w": inputs["b"]}) if single else (inputs["a"], inputs["b"])
    merged = merging.merge(
        "slerp", a, {"b": b}, t=params["t"], linear_above=params.get("dot_threshold", 0.9995)
    )
    return {"merged": merged["w"] if single else merged}


def karcher(case: dict[str, Any], tensors: dict[str, Tensor]) -> dict[str, Any]:
    params, inputs = case["params"], resolve(case["inputs"], tensors)
    refuse_unknown(params, "max_iter", "tol")
    base = {name: torch.zeros_like(tensor) for name, tensor in inputs["experts"][0].items()}
    merged = merging.merge(
        "karcher",
        base,
        named(inputs["experts"]),
        iterations=params.get("max_iter", 10),
        tolerance=params.get("tol", 1e-5),
    )
    return {"merged": merged}


def model_stock(case: dict[str, Any], tensors: dict[str, Tensor]) -> dict[str, Any]:
    params, inputs = case["params"], resolve(case["inputs"], tensors)
    refuse_unknown(params, "filter_wise", "ignore_keys")
    if params.get("ignore_keys"):
        raise NotExpressible(
            "keys cannot be left out through merge(); a spec's backbone decides what is kept"
        )
    merged = merging.merge(
        "model_stock",
        inputs["base"],
        named(inputs["experts"]),
        rows=params.get("filter_wise", False),
        mean="cosines" if "filter_wise" in params else "angles",
        clamp=False,
    )
    return {"merged": merged}
