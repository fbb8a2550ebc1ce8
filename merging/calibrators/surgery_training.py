"""The mathematics of Representation Surgery: a low-rank correction of a feature, its training, its file.

Shape letters: N examples, B examples of a batch, F final feature, R rank.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from merging.calibrators.feature_training import descend, leaf, load_modules, refuse_module, save_module
from merging.data.draw import generator

SUFFIX = ".surgery.safetensors"


@dataclass(frozen=True)
class FeatureCorrection:
    """f' = f - W_up relu(W_down f). `last_loss` is that of the last training step, before its update."""

    down_RF: Tensor
    up_FR: Tensor
    last_loss: float | None = None

    def __call__(self, features_BF: Tensor) -> Tensor:
        return corrected(features_BF, self.down_RF.to(features_BF), self.up_FR.to(features_BF))


def corrected(features_BF: Tensor, down_RF: Tensor, up_FR: Tensor) -> Tensor:
    """f' = f - W_up relu(W_down f)."""
    return features_BF - torch.relu(features_BF @ down_RF.T) @ up_FR.T


def initial(features: int, rank: int, *, seed: int, task: str) -> FeatureCorrection:
    """The identity: W_down Kaiming-uniform with a = sqrt 5, W_up zero. Depends on seed and task alone."""
    down_RF = kaiming_uniform(rank, features, seed, task, "surgery")
    return FeatureCorrection(down_RF, torch.zeros(features, rank))


def kaiming_uniform(outputs: int, features: int, seed: int, *names: str) -> Tensor:
    """A linear's weight as torch starts it (Kaiming-uniform with a = sqrt 5), from seed and names alone."""
    bound = 1 / math.sqrt(features)
    return torch.empty(outputs, features).uniform_(-bound, bound, generator=generator(seed, *names))


def train_surgery(
    merged_NF: Tensor,
    expert_NF: Tensor,
    start: FeatureCorrection,
    *,
    batches: Iterable[Tensor],
    learning_rate: float,
) -> FeatureCorrection:
    """Adam on the mean |corrected - expert's feature|, one step per batch of row numbers (B)."""
    down_RF, up_FR = leaf(start.down_RF), leaf(start.up_FR)

    def loss_of(rows_B: Tensor) -> Tensor:
        return (corrected(merged_NF[rows_B], down_RF, up_FR) - expert_NF[rows_B]).abs().mean()

    last = descend([down_RF, up_FR], loss_of, batches=batches, learning_rate=learning_rate)
    return FeatureCorrection(down_RF.detach(), up_FR.detach(), last)


def save_correction(correction: FeatureCorrection, task: str, folder: Path) -> Path:
    """Write `<task>.surgery.safetensors`."""
    return save_module({"down": correction.down_RF, "up": correction.up_FR}, task, folder, SUFFIX)


def load_corrections(folder: Path) -> dict[str, FeatureCorrection]:
    """All that `save_correction` wrote there, by task. Raises DataError if there are none."""
    corrections = {}
    for task, (path, tensors) in load_modules(folder, SUFFIX, "surgery").items():
        if tensors.keys() != {"down", "up"} or tensors["down"].shape != tensors["up"].T.shape:
            expected = "down [rank, features] and up [features, rank]"
            raise refuse_module("surgery", path, tensors, expected)
        corrections[task] = FeatureCorrection(tensors["down"], tensors["up"])
    return corrections
