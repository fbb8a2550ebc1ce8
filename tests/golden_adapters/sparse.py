"""DARE, DARE-TIES, DELLA, Breadcrumbs and SCE, with the recorded masks and uniforms where they draw."""

from __future__ import annotations

from typing import Any

from torch import Tensor

import merging
from golden_adapters.expressing import named, refuse_unknown, resolve
from golden_adapters.rules import State, drawn_from, from_masks, run
from golden_adapters.ties import share
from merging.strategies.dare import Dare
from merging.strategies.dare_ties import DareTies
from merging.strategies.della import Della

_MERGEKIT = ("weights", "density", "normalize", "rescale", "lambda", "int8_mask")


def dare(case: dict[str, Any], tensors: dict[str, Tensor]) -> dict[str, Any]:
    params, inputs = case["params"], resolve(case["inputs"], tensors)
    if "density" in params:
        refuse_unknown(params, *_MERGEKIT)
        settings = {
            "density": params["density"],
            "rescale": "norm" if params["rescale"] else "none",
            "scale": params.get("lambda", 1.0),
            "normalize": params.get("normalize", False),
        }
        return {"merged": run(drawn_from(Dare, from_masks(inputs), **settings), inputs, params["weights"])}
    refuse_unknown(
        params, "drop_rate", "scaling_factor", "scaling_coefficient", "rescale", "only_on_linear_weights"
    )
    settings = {
        "density": 1 - params["drop_rate"],
        "rescale": "expectation" if params["rescale"] else "none",
        "scale": params["scaling_factor"] if "scaling_factor" in params else params["scaling_coefficient"],
    }
    if params.get("only_on_linear_weights"):
        settings["tensors"] = _linear_weights(inputs["base"])
    return {"merged": run(drawn_from(Dare, from_masks(inputs), **settings), inputs)}


def dare_ties(case: dict[str, Any], tensors: dict[str, Tensor]) -> dict[str, Any]:
    params, inputs = case["params"], resolve(case["inputs"], tensors)
    if "density" in params:
        refuse_unknown(params, *_MERGEKIT)
        rule = drawn_from(
            DareTies,
            from_masks(inputs),
            density=params["density"],
            rescale="norm" if params["rescale"] else "none",
            scale=params.get("lambda", 1.0),
            merge="mean" if params.get("normalize", True) else "sum",
        )
        return {"merged": run(rule, inputs, params["weights"])}
    refuse_unknown(params, "drop_rate", "rescale", "scaling_factor", "threshold", "merge_func")
    rule = drawn_from(
        DareTies,
        from_masks(inputs),
        density=1 - params["drop_rate"],
        rescale="expectation" if params["rescale"] else "none",
        scale=params["scaling_factor"],
        trim=share(params["threshold"]),
        merge=params["merge_func"],
    )
    return {"merged": run(rule, inputs)}


def della(case: dict[str, Any], tensors: dict[str, Tensor]) -> dict[str, Any]:
    params, inputs = case["params"], resolve(case["inputs"], tensors)
    refuse_unknown(params, *_MERGEKIT, "epsilon")
    rule = drawn_from(
        Della,
        lambda name, expert: inputs["uniforms"][expert][name],
        density=params["density"],
        epsilon=params["epsilon"],
        rescale="norm" if params["rescale"] else "none",
        scale=params.get("lambda", 1.0),
        elect="linear" not in case["variant"],
        normalize=params["normalize"],
    )
    return {"merged": run(rule, inputs, params["weights"])}


def breadcrumbs(case: dict[str, Any], tensors: dict[str, Tensor]) -> dict[str, Any]:
    params, inputs = case["params"], resolve(case["inputs"], tensors)
    refuse_unknown(params, *_MERGEKIT, "gamma")
    merged = merging.merge(
        "breadcrumbs",
        inputs["base"],
        named(inputs["experts"]),
        weights=named(params["weights"]),
        density=params["density"],
        gamma=params["gamma"],
        scale=params.get("lambda", 1.0),
        elect="ties" in case["variant"],
        normalize=params["normalize"],
    )
    return {"merged": _as_the_empty_slice_leaves_it(merged, inputs["base"], params)}


def sce(case: dict[str, Any], tensors: dict[str, Tensor]) -> dict[str, Any]:
    params, inputs = case["params"], resolve(case["inputs"], tensors)
    refuse_unknown(params, "select_topk", "int8_mask")
    return {
        "merged": merging.merge(
            "sce", inputs["base"], named(inputs["experts"]), density=params["select_topk"]
        )
    }


def _linear_weights(base: State) -> tuple[str, ...]:
    """The toy's linear weights: matrices, except its embedding, which no shape tells from them."""
    return tuple(name for name, tensor in base.items() if tensor.ndim == 2 and not name.startswith("emb"))


def _as_the_empty_slice_leaves_it(merged: State, base: State, params: dict[str, Any]) -> State:
    """mergekit loses a tensor's whole task vector where the upper cut is empty; this package does not."""
    if params["density"] >= 1:
        return merged
    return {
        name: base[name] if _upper_cut(tensor.numel(), params) == 0 else tensor
        for name, tensor in merged.items()
    }


def _upper_cut(entries: int, params: dict[str, Any]) -> int:
    return min(int(params["gamma"] * entries), entries - int(params["density"] * entries))
