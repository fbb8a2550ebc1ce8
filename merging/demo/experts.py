"""An expert: the base, all its weights fine-tuned on one task in small steps under that task's fixed head."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from merging.demo.augmentation import augmented
from merging.demo.backbone import features, open_model, save_model, unit_scale
from merging.demo.tasks import Pictures

BATCH = 32
LEARNING_RATE = 2e-5
"""Small, so that experts stay near the base and to each other: that is what merging lives on."""

_WARM_UP = 0.1
_LARGEST_GRADIENT = 1.0


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
    """Write an expert's checkpoint to `folder`. The steps are counted, not timed: a rerun gives the same."""
    model = open_model(base).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _rate(step, steps))
    generator = torch.Generator().manual_seed(seed)
    labels = torch.from_numpy(pictures.labels)
    for step in range(steps):
        report(step, steps)
        chosen = torch.randint(len(pictures), (BATCH,), generator=generator)
        images = augmented(unit_scale(pictures.pixels[chosen.numpy()]), generator)
        with torch.autocast("cpu", torch.bfloat16, enabled=_has_bfloat16()):
            seen = features(model, images)
        loss = F.cross_entropy(F.linear(seen, head["weight"], head["bias"]), labels[chosen])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), _LARGEST_GRADIENT)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    save_model(model, folder)
    report(steps, steps)


def _rate(step: int, steps: int) -> float:
    """Share of the learning rate: a linear rise, then half a cosine to zero."""
    return min(1.0, (step + 1) / (_WARM_UP * steps)) * (0.5 + 0.5 * math.cos(math.pi * step / steps))


def _has_bfloat16() -> bool:
    """Whether the processor multiplies in bfloat16 itself; emulating it would be slower than float32."""
    # Older versions of torch cannot tell.
    capabilities: Mapping[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    return bool(capabilities.get("avx512_bf16") or capabilities.get("amx_bf16"))
