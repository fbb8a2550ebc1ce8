"""ProbSurgery: one forward with given noise, its divergence, and what inference makes of the features."""

from __future__ import annotations

from typing import Any

from golden_adapters.expressing import refuse_unknown, resolve
from merging.calibrators.prob_surgery_training import BiasDistribution, divergence, sampled


def prob_surgery(case: dict[str, Any], tensors: dict[str, Any]) -> dict[str, Any]:
    refuse_unknown(case["params"], "inference")
    inputs = resolve(case["inputs"], tensors)
    module = BiasDistribution(inputs["up"], inputs["mean"], inputs["logvar"])
    mean_BF, logvar_BF = module.moments(inputs["features"])
    return {
        "train_features": sampled(inputs["features"], mean_BF, logvar_BF, inputs["noise"]),
        "inference_features": module(inputs["features"]),
        "kl": divergence(mean_BF, logvar_BF).reshape(1),
    }


ADAPTERS = {"prob_surgery": prob_surgery}
