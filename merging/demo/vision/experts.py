"""An expert: the base, all its weights fine-tuned on one task in small steps under that task's fixed head."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from merging.demo.fine_tuning import fast_arithmetic, fine_tune
from merging.demo.vision.augmentation import augmented
from merging.demo.vision.backbone import features, open_model, save_model, unit_scale
from merging.demo.vision.tasks import Pictures

BATCH = 32
LEARNING_RATE = 2e-5
"""Small, so that experts stay near the base and to each other: that is what merging lives on."""


def train_expert(
    base: Path,
    pictures: Pictures,
    head: dict[str, Tensor],
    folder: Path,
    *,
    steps: int,
    seed: int,
    report: Callable[[int, int], None],
) -> None:
    """Write an expert's checkpoint to `folder`."""
    model = open_model(base).train()
    generator = torch.Generator().manual_seed(seed)
    labels = torch.from_numpy(pictures.labels)

    def loss() -> Tensor:
        chosen = torch.randint(len(pictures), (BATCH,), generator=generator)
        images = augmented(unit_scale(pictures.pixels[chosen.numpy()]), generator)
        with fast_arithmetic():
            seen = features(model, images)
        return F.cross_entropy(F.linear(seen, head["weight"], head["bias"]), labels[chosen])

    fine_tune(model.parameters(), loss, learning_rate=LEARNING_RATE, steps=steps, report=report)
    save_model(model, folder)
