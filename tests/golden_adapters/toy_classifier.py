"""The golden manifest's classifier, Linear -> LayerNorm -> ReLU -> Linear, as a backbone without a head.

The scores are the features: the last linear is merged like the others, as in the recorded runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from tiny_models import Given
from torch import Tensor, nn

from golden_adapters.expressing import NotExpressible, named
from merging.checkpoints.source import StateDictSource
from merging.contracts.backbone import Backbone
from merging.contracts.models import Models
from merging.data.task import CalibrationData

MODEL = "Linear -> LayerNorm -> ReLU -> Linear"


class Classifier(nn.Module):
    def __init__(self, base: Mapping[str, Tensor]) -> None:
        super().__init__()
        hidden, inputs = base["fc1.weight"].shape
        self.fc1, self.norm = nn.Linear(inputs, hidden), nn.LayerNorm(hidden)
        self.fc2 = nn.Linear(hidden, base["fc2.weight"].shape[0])

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.norm(self.fc1(x)).relu())


class ToyBackbone(Backbone):
    def skeleton(self) -> nn.Module:
        with torch.device("meta"):
            return Classifier(self.config).eval()

    def stacks(self, model: nn.Module) -> tuple[str, ...]:
        return ()

    def features(self, output: Any, batch: Any) -> Tensor:
        return output


def models_of(base: dict[str, Tensor], experts: list[dict[str, Tensor]], weights: list[float]) -> Models:
    wanted = {"fc1.weight", "fc1.bias", "norm.weight", "norm.bias", "fc2.weight", "fc2.bias"}
    if base.keys() != wanted:
        raise NotExpressible(f"the adapter knows the model {MODEL} only")
    sources = {task: StateDictSource(expert) for task, expert in named(experts).items()}
    return Models(StateDictSource(base), sources, named(weights), ToyBackbone(base))


def data_of(batches: list[Tensor]) -> CalibrationData:
    """One task per entry, of shape [batches, examples, features]."""
    examples = {task: Given(*({"x": x} for x in stacked)) for task, stacked in named(batches).items()}
    return CalibrationData(examples, dict.fromkeys(examples, lambda features_BF: features_BF))
