"""AdaMerging: step t learns on batch t of every task."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from golden_adapters import toy_classifier
from golden_adapters.expressing import NotExpressible, named, refuse_unknown, resolve
from merging.entropy_descent import MergedModel, descend, entropy
from merging.functional import FunctionalModel


def ada_merging(case: dict[str, Any], tensors: dict[str, Tensor]) -> dict[str, Any]:
    params, inputs = case["params"], resolve(case["inputs"], tensors)
    refuse_unknown(params, "prior", "lr", "steps", "clamp", "model", "parameter_order")
    if params.get("clamp") not in (None, [0, 1]):
        raise NotExpressible(f"coefficients are clamped to [0, 1] or not at all, not to {params['clamp']}")
    base, vectors = inputs["base"], inputs["task_vectors"]
    models = toy_classifier.models_of(base, vectors, [1.0] * len(vectors))
    data = toy_classifier.data_of(inputs["batches"])
    model = FunctionalModel(models.backbone, models.base.names())
    layers = tensors[case["outputs"]["lambdas"]].shape[0] > 1
    rows = {name: place if layers else 0 for place, name in enumerate(params["parameter_order"])}
    deltas = {name: torch.stack([vector[name] for vector in vectors]) for name in base}
    merged, turns = MergedModel({}, base, deltas, rows), iter(range(params["steps"]))

    def gradient(coefficients_LN: Tensor) -> tuple[float, Tensor]:
        turn = next(turns)

        def loss(task: str) -> Any:
            batch = data[task].batches()[turn]
            return lambda weights: entropy(model.scores(weights, batch, data.heads[task], task=task))

        return merged.gradient(coefficients_LN, [loss(task) for task in named(vectors)])

    start_LN = torch.full((len(set(rows.values())), len(vectors)), float(params["prior"]))
    clamp = params.get("clamp") is not None
    steps = list(descend(start_LN, gradient, steps=params["steps"], learning_rate=params["lr"], clamp=clamp))
    return {
        "lambdas": steps[-1].coefficients_LN,
        "gradients": torch.stack([step.gradient_LN for step in steps]),
        "losses": torch.tensor([step.loss for step in steps]),
    }


ADAPTERS = {"adamerging": ada_merging}
