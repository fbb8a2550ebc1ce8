"""Fisher merging: given diagonals, the PyTorch ports end to end, and the exact Fisher of the original."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from golden_adapters import toy_classifier
from golden_adapters.expressing import NotExpressible, refuse_unknown, resolve
from merging.checkpoints.sink import StateDictSink
from merging.fisher_information import fisher_mean, floored
from merging.strategies.fisher import Fisher


def fisher(case: dict[str, Any], tensors: dict[str, Tensor]) -> dict[str, Any]:
    params, inputs = case["params"], resolve(case["inputs"], tensors)
    if "fishers" in inputs:
        return {"merged": _given(params, inputs)}
    if "fisher_floor" in params:
        refuse_unknown(
            params, "coefficients", "fisher_floor", "favor_target_model", "normalize_fishers", "model"
        )
        target = "expert000" if params["favor_target_model"] else None
        settings = {
            "floor": params["fisher_floor"], "target": target, "normalize": params["normalize_fishers"],
        }  # fmt: skip
        return _end_to_end(params, inputs, **settings)
    refuse_unknown(
        params, "normalize_fisher_weight", "minimal_fisher_weight", "coefficients", "model", "batches_layout"
    )
    if params.get("model", toy_classifier.MODEL) != toy_classifier.MODEL:
        raise NotExpressible(f"the adapter knows the model {toy_classifier.MODEL} only")
    return _end_to_end(
        params,
        inputs,
        estimate="batch",
        floor=params["minimal_fisher_weight"],
        floor_by="add",
        normalize=params["normalize_fisher_weight"],
    )


def _given(params: dict[str, Any], inputs: dict[str, Any]) -> dict[str, Tensor]:
    """The ports' mean: the floor is added, also to the norms."""
    refuse_unknown(params, "normalize_fisher_weight", "minimal_fisher_weight", "coefficients")
    floor, fishers = params["minimal_fisher_weight"], inputs["fishers"]
    weights_N = torch.tensor(params["coefficients"], dtype=torch.float64)
    if params["normalize_fisher_weight"]:
        squares = [sum(f.double().square().sum() for f in fisher.values()) for fisher in fishers]
        weights_N = weights_N / floored(torch.stack(squares).sqrt(), floor, "add")
    return {
        name: fisher_mean(
            torch.stack([expert[name].double() for expert in inputs["experts"]]),
            torch.stack([fisher[name].double() for fisher in fishers]),
            weights_N,
            floor=floor,
            by="add",
        ).float()
        for name in inputs["base"]
    }


def _end_to_end(params: dict[str, Any], inputs: dict[str, Any], **settings: Any) -> dict[str, Any]:
    experts = inputs["experts"]
    models = toy_classifier.models_of(
        inputs["base"], experts, params.get("coefficients", [1.0] * len(experts))
    )
    rule, data = Recording(**settings), toy_classifier.data_of(inputs["batches"])
    sink = StateDictSink(models.base)
    with sink:
        rule.merge(models, data, sink)
    return {"merged": sink.tensors, "fishers": rule.fishers}


class Recording(Fisher):
    """Keeps the Fishers, which the case records too."""

    def _of_expert(self, *args: Any) -> dict[str, Tensor]:
        found = super()._of_expert(*args)
        self.fishers = [*getattr(self, "fishers", []), found]
        return found


ADAPTERS = {"fisher": fisher}
