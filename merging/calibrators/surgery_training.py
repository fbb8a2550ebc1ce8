"""The mathematics of Representation Surgery: a low-rank correction of a feature, its training, its file.

Shape letters: N examples, B examples of a batch, F final feature, R rank.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import torch
from torch import Tensor

from merging.data.draw import generator
from merging.data.tensor_file import open_tensor_file
from merging.errors import DataError

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
    bound = 1 / math.sqrt(features)
    random = generator(seed, task, "surgery")
    down_RF = torch.empty(rank, features).uniform_(-bound, bound, generator=random)
    return FeatureCorrection(down_RF, torch.zeros(features, rank))


def drawn_batches(
    examples: int, *, iterations: int, batches: int, batch_size: int, seed: int, task: str
) -> Iterator[Tensor]:
    """Row numbers (B) of each step: in each iteration the first `batches` batches of a new permutation."""
    random = generator(seed, task, "surgery batches")
    for _ in range(iterations):
        yield from torch.randperm(examples, generator=random).split(batch_size)[:batches]


def train_surgery(
    merged_NF: Tensor,
    expert_NF: Tensor,
    start: FeatureCorrection,
    *,
    batches: Iterable[Tensor],
    learning_rate: float,
) -> FeatureCorrection:
    """Adam on the mean |corrected - expert's feature|, one step per batch of row numbers (B)."""
    down_RF = start.down_RF.clone().requires_grad_()
    up_FR = start.up_FR.clone().requires_grad_()
    adam = torch.optim.Adam([down_RF, up_FR], lr=learning_rate)
    loss: Tensor | None = None
    with torch.enable_grad():
        for rows_B in batches:
            loss = (corrected(merged_NF[rows_B], down_RF, up_FR) - expert_NF[rows_B]).abs().mean()
            adam.zero_grad()
            loss.backward()
            adam.step()
    return FeatureCorrection(down_RF.detach(), up_FR.detach(), None if loss is None else loss.item())


def save_correction(correction: FeatureCorrection, task: str, folder: Path) -> Path:
    """Write `<task>.surgery.safetensors`."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{quote(task, safe=' ')}{SUFFIX}"
    save_file({"down": correction.down_RF, "up": correction.up_FR}, path, metadata={"task": task})
    return path


def load_corrections(folder: Path) -> dict[str, FeatureCorrection]:
    """All that `save_correction` wrote there, by task. Raises DataError if there are none."""
    paths = sorted(folder.glob(f"*{SUFFIX}"))
    if not paths:
        raise DataError(f"surgery: no *{SUFFIX} in {folder}")
    corrections = {}
    for path in paths:
        with open_tensor_file(path, "surgery") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            task = (file.metadata() or {}).get("task", path.name.removesuffix(SUFFIX))
        if tensors.keys() != {"down", "up"} or tensors["down"].shape != tensors["up"].T.shape:
            found = ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in tensors.items())
            raise DataError(
                f"surgery: {path} has {found}; expected down [rank, features] and up [features, rank]"
            )
        corrections[task] = FeatureCorrection(tensors["down"], tensors["up"])
    return corrections
