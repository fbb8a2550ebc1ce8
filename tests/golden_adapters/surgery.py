"""Representation Surgery: step t trains on batch t, features come as [steps, batch, feature]."""

from __future__ import annotations

from typing import Any

import torch

from golden_adapters.expressing import NotExpressible, refuse_unknown, resolve
from merging.calibrators.surgery_training import FeatureCorrection, train_surgery


def surgery(case: dict[str, Any], tensors: dict[str, Any]) -> dict[str, Any]:
    params, inputs = case["params"], resolve(case["inputs"], tensors)
    refuse_unknown(params, "lr", "steps", "rank", "loss")
    if params.get("loss", "L1 mean") != "L1 mean":
        raise NotExpressible(f'surgery trains on the mean absolute difference, not "{params["loss"]}"')
    merged, expert = inputs["merged_features"], inputs["expert_features"]
    rows = torch.arange(merged.shape[0] * merged.shape[1]).view(merged.shape[:2])[: params["steps"]]
    trained = train_surgery(
        merged.flatten(0, 1),
        expert.flatten(0, 1),
        FeatureCorrection(inputs["down_init"], inputs["up_init"]),
        batches=rows,
        learning_rate=params["lr"],
    )
    return {
        "down": trained.down_RF,
        "up": trained.up_FR,
        "last_loss": torch.tensor([trained.last_loss]),
        "corrected_last_batch": trained(merged[len(rows) - 1]),
    }


ADAPTERS = {"surgery": surgery}
