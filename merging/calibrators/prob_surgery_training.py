"""The mathematics of ProbSurgery: a distribution over a feature's bias, its training, its file.

Shape letters: N examples, B examples of a batch, F final feature, H hidden.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from merging.calibrators.feature_training import descend, leaf, load_modules, refuse_module, save_module
from merging.calibrators.surgery_training import kaiming_uniform
from merging.data.draw import generator

SUFFIX = ".prob_surgery.safetensors"


@dataclass(frozen=True)
class BiasDistribution:
    """What a feature is wrong by: normal, with mean W_mean h and log-variance W_var h, h = relu(W_up f).

    Called, it subtracts the mean; so does inference. `last_loss` is that of the last training step.
    """

    up_HF: Tensor
    mean_FH: Tensor
    logvar_FH: Tensor
    last_loss: float | None = None

    def __call__(self, features_BF: Tensor) -> Tensor:
        hidden_BH = torch.relu(features_BF @ self.up_HF.to(features_BF).T)
        return features_BF - hidden_BH @ self.mean_FH.to(features_BF).T

    def moments(self, features_BF: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and log-variance of the bias (B F each)."""
        hidden_BH = torch.relu(features_BF @ self.up_HF.T)
        return hidden_BH @ self.mean_FH.T, hidden_BH @ self.logvar_FH.T


def sampled(features_BF: Tensor, mean_BF: Tensor, logvar_BF: Tensor, noise_BF: Tensor) -> Tensor:
    """f - z with z = mean + exp(logvar / 2) noise, the feature that training looks at."""
    return features_BF - (mean_BF + (0.5 * logvar_BF).exp() * noise_BF)


def divergence(mean_BF: Tensor, logvar_BF: Tensor) -> Tensor:
    """KL of the bias from the standard normal: summed over features, the mean over examples."""
    return (-0.5 * (1 + logvar_BF - mean_BF.square() - logvar_BF.exp()).sum(dim=-1)).mean()


def initial(features: int, hidden: int, *, seed: int, task: str) -> BiasDistribution:
    """The identity, of variance 1: W_up Kaiming-uniform with a = sqrt 5, the other two zero."""
    up_HF = kaiming_uniform(hidden, features, seed, task, "prob_surgery")
    return BiasDistribution(up_HF, torch.zeros(features, hidden), torch.zeros(features, hidden))


def train_prob_surgery(
    merged_NF: Tensor,
    expert_NF: Tensor,
    start: BiasDistribution,
    *,
    batches: Iterable[Tensor],
    learning_rate: float,
    divergence_weight: float,
    seed: int,
    task: str,
) -> BiasDistribution:
    """Adam on mean |f - z - expert's feature| + weight * KL, one sample z per example and step."""
    up_HF, mean_FH, logvar_FH = leaf(start.up_HF), leaf(start.mean_FH), leaf(start.logvar_FH)
    module = BiasDistribution(up_HF, mean_FH, logvar_FH)
    random = generator(seed, task, "prob_surgery noise")

    def loss_of(rows_B: Tensor) -> Tensor:
        merged_BF = merged_NF[rows_B]
        mean_BF, logvar_BF = module.moments(merged_BF)
        noise_BF = torch.randn(merged_BF.shape, generator=random).to(merged_BF)
        gap = (sampled(merged_BF, mean_BF, logvar_BF, noise_BF) - expert_NF[rows_B]).abs().mean()
        return gap + divergence_weight * divergence(mean_BF, logvar_BF)

    last = descend([up_HF, mean_FH, logvar_FH], loss_of, batches=batches, learning_rate=learning_rate)
    return BiasDistribution(up_HF.detach(), mean_FH.detach(), logvar_FH.detach(), last)


def save_distribution(module: BiasDistribution, task: str, folder: Path) -> Path:
    """Write `<task>.prob_surgery.safetensors`."""
    tensors = {"up": module.up_HF, "mean": module.mean_FH, "logvar": module.logvar_FH}
    return save_module(tensors, task, folder, SUFFIX)


def load_distributions(folder: Path) -> dict[str, BiasDistribution]:
    """All that `save_distribution` wrote there, by task. Raises DataError if there are none."""
    modules = {}
    for task, (path, tensors) in load_modules(folder, SUFFIX, "prob_surgery").items():
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        turned = shapes.get("up", ())[::-1]
        if (
            shapes.keys() != {"up", "mean", "logvar"}
            or shapes["mean"] != turned
            or shapes["logvar"] != turned
        ):
            expected = "up [hidden, features], mean and logvar [features, hidden]"
            raise refuse_module("prob_surgery", path, tensors, expected)
        modules[task] = BiasDistribution(tensors["up"], tensors["mean"], tensors["logvar"])
    return modules
