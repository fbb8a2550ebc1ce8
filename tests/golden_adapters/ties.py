"""TIES: the flat form (authors, fusion_bench, MergeLM), mergekit's form per tensor, and trim + elect alone.

The references subtract in the storage dtype, this package in float64: in 16-bit checkpoints, magnitudes that
the references hold to be equal then are not. There, adapters hand over task vectors rounded as theirs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import merging
from golden_adapters.expressing import NotExpressible, named, refuse_unknown, resolve
from merging import task_vectors
from merging.contracts.vectors import Held
from merging.thresholds import magnitude_thresholds

State = dict[str, Tensor]


def ties(case: dict[str, Any], tensors: dict[str, Tensor]) -> dict[str, Any]:
    params, inputs = case["params"], resolve(case["inputs"], tensors)
    if "selected_task_vectors" in case["outputs"]:
        return _split(params, inputs)
    if "topk_percent" in params:
        return {"merged": _official(params, inputs)}
    if "param_value_mask_rate" in params:
        return {"merged": _mergelm(params, inputs)}
    if "density" in params:
        return {"merged": _mergekit(params, inputs)}
    return {"merged": _flat(params, inputs)}


def _flat(params: dict[str, Any], inputs: dict[str, Any]) -> State:
    refuse_unknown(params, "scaling_factor", "threshold", "merge_func", "remove_keys")
    if params.get("remove_keys"):
        raise NotExpressible(
            "keys cannot be left out through merge(); a spec's backbone decides what is kept"
        )
    return _merged(
        inputs,
        scale=params["scaling_factor"],
        density=share(params["threshold"]),
        merge=params["merge_func"],
    )


def _official(params: dict[str, Any], inputs: dict[str, Any]) -> State:
    refuse_unknown(params, "topk_percent", "resolve_method", "merge_func", "lambda")
    return _merged(
        inputs,
        scale=params["lambda"],
        density=share(params["topk_percent"]),
        elect=params["resolve_method"],
        merge=params["merge_func"].removeprefix("dis-"),
    )


def _mergelm(params: dict[str, Any], inputs: dict[str, Any]) -> State:
    """MergeLM cuts at the int(d * mask_rate)-th smallest magnitude, not at the (d - int(d * density))-th."""
    refuse_unknown(params, "param_value_mask_rate", "scaling_coefficient")
    elements = sum(tensor.numel() for tensor in inputs["base"].values())
    kept = elements - int(elements * params["param_value_mask_rate"])
    density = min(1.0, (kept + 0.5) / elements)
    return _merged(inputs, scale=params["scaling_coefficient"], density=density, merge="mean")


def _mergekit(params: dict[str, Any], inputs: dict[str, Any]) -> State:
    refuse_unknown(params, "weights", "density", "normalize", "rescale", "lambda", "int8_mask")
    if params.get("rescale"):
        raise NotExpressible("ties does not rescale what is kept")
    density = params["density"]
    if ties_at_the_cut(inputs, density):
        inputs, density = trimmed_as_mergekit(inputs, density), 1.0
    return _merged(
        inputs,
        weights=named(params["weights"]),
        trim="tensor",
        scale=params.get("lambda", 1.0),
        density=density,
        merge="mean" if params.get("normalize", True) else "sum",
    )


def _split(params: dict[str, Any], inputs: dict[str, Any]) -> dict[str, Any]:
    refuse_unknown(params, "threshold")
    vectors = [(name, torch.stack(deltas)) for name, deltas in stored_deltas(inputs).items()]
    thresholds_N = magnitude_thresholds(Held(vectors), share(params["threshold"]))
    trimmed = {name: task_vectors.trim(deltas_NS, thresholds_N) for name, deltas_NS in vectors}
    signs = {name: task_vectors.elect_by_mass(trimmed_NS) for name, trimmed_NS in trimmed.items()}
    majority = 1.0 if sum(float(sign_S.sum()) for sign_S in signs.values()) > 0 else -1.0
    selected = {
        name: task_vectors.agreeing(trimmed_NS, signs[name].where(signs[name] != 0, majority))
        for name, trimmed_NS in trimmed.items()
    }
    experts = range(len(inputs["experts"]))
    return {
        "selected_task_vectors": [{name: chosen[i] for name, chosen in selected.items()} for i in experts]
    }


def _merged(inputs: dict[str, Any], **settings: Any) -> State:
    weights = settings.pop("weights", None)
    base, experts = inputs["base"], inputs["experts"]
    if "deltas" in inputs or any(tensor.dtype.itemsize < 4 for tensor in base.values()):
        base, experts = as_float64(inputs)
    merged = merging.merge("ties", base, named(experts), weights=weights, **settings)
    return {name: merged[name].to(tensor.dtype) for name, tensor in inputs["base"].items()}


def share(threshold: float) -> float:
    """The references read a threshold above 1 as percent."""
    return threshold / 100 if threshold > 1 else threshold


def stored_deltas(inputs: dict[str, Any]) -> dict[str, list[Tensor]]:
    """Task vectors by tensor, subtracted in the storage dtype."""
    if "deltas" in inputs:
        return inputs["deltas"]
    return {
        name: [expert[name] - base for expert in inputs["experts"]] for name, base in inputs["base"].items()
    }


def as_float64(inputs: dict[str, Any]) -> tuple[State, list[State]]:
    """Base and experts in float64, such that expert - base is exactly the stored task vector."""
    base = {name: tensor.double() for name, tensor in inputs["base"].items()}
    deltas = stored_deltas(inputs)
    experts = [
        {name: base[name] + deltas[name][i].double() for name in base} for i in range(len(inputs["experts"]))
    ]
    return base, experts


def ties_at_the_cut(inputs: dict[str, Any], density: float) -> bool:
    """Whether equal magnitudes lie on both sides of a cut somewhere, so that the order of a sort decides."""
    for deltas in stored_deltas(inputs).values():
        for delta_S in deltas:
            ranked = delta_S.abs().flatten().float().sort(descending=True).values
            count = int(density * len(ranked))
            if 0 < count < len(ranked) and ranked[count - 1] == ranked[count] > 0:
                return True
    return False


def trimmed_as_mergekit(inputs: dict[str, Any], density: float) -> dict[str, Any]:
    """Inputs with trimmed task vectors: of equal magnitudes, those that an unstable argsort puts first.

    Which these are depends on the processor; this package takes the first in the tensor. All else about its
    trim is compared here: it must keep the same magnitudes.
    """
    trimmed = {}
    for name, deltas in stored_deltas(inputs).items():
        trimmed[name] = [_argsort_trim(delta_S, density) for delta_S in deltas]
        ours_NS = task_vectors.trim_each(torch.stack(deltas), density)
        for our_S, their_S in zip(ours_NS, trimmed[name], strict=True):
            assert torch.equal(our_S.abs().flatten().sort().values, their_S.abs().flatten().sort().values)
    return {**inputs, "deltas": trimmed}


def _argsort_trim(delta_S: Tensor, density: float) -> Tensor:
    kept = delta_S.abs().flatten().float().argsort(descending=True)[: int(density * delta_S.numel())]
    trimmed = torch.zeros_like(delta_S).flatten()
    trimmed[kept] = delta_S.flatten()[kept]
    return trimmed.view(delta_S.shape)
