"""Pictures gone bad: noise, motion blur and fog on calibration examples, as FeatCal's authors try them.

Shape letters: B examples, C channels, H and W height and width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from merging.contracts.backbone import Batch
from merging.data.task import CalibrationData, Examples
from merging.demo.vision.base_model import MEAN, STD

_NOISE, _BLURRED, _FOG = 0.18, 9, 0.6


def noise(images_BCHW: Tensor, dice: torch.Generator) -> Tensor:
    """Gaussian, on a scale from 0 to 1."""
    return images_BCHW + _NOISE * torch.randn(images_BCHW.shape, generator=dice)


def motion_blur(images_BCHW: Tensor, dice: torch.Generator) -> Tensor:
    """The mean of nine pixels along a line, horizontal or falling."""
    line = torch.eye(_BLURRED) if torch.rand((), generator=dice) < 0.5 else torch.zeros(_BLURRED, _BLURRED)
    if not line.any():
        line[_BLURRED // 2] = 1
    kernel = (line / line.sum()).expand(images_BCHW.shape[1], 1, -1, -1)
    padded = F.pad(images_BCHW, [_BLURRED // 2] * 4, mode="replicate")
    return F.conv2d(padded, kernel, groups=images_BCHW.shape[1])


def fog(images_BCHW: Tensor, dice: torch.Generator) -> Tensor:
    """A bright veil of uneven density."""
    coarse = torch.rand(len(images_BCHW), 1, 4, 4, generator=dice)
    veil = F.interpolate(coarse, size=images_BCHW.shape[-2:], mode="bilinear", align_corners=False)
    density = _FOG * (0.5 + 0.5 * veil)
    return images_BCHW * (1 - density) + 0.9 * density


CORRUPTIONS: Mapping[str, Callable[[Tensor, torch.Generator], Tensor]] = {
    "noise": noise,
    "motion blur": motion_blur,
    "fog": fog,
}


def corrupted(data: CalibrationData, kind: str, seed: int) -> CalibrationData:
    """The same pictures after a corruption by name."""
    return CalibrationData({task: _Corrupted(data[task], kind, seed) for task in data}, data.heads)


class _Corrupted(Examples):
    def __init__(self, examples: Examples, kind: str, seed: int) -> None:
        self._examples, self._kind = examples, kind
        self.asked, self.batch_size = examples.asked, examples.batch_size
        mean, std = (torch.tensor(values).view(3, 1, 1) for values in (MEAN, STD))
        dice = torch.Generator().manual_seed(seed)
        self._batches = []
        for batch in examples.batches():
            images_BCHW = CORRUPTIONS[kind](batch["pixel_values"] * std + mean, dice).clamp(0, 1)
            self._batches.append({**batch, "pixel_values": (images_BCHW - mean) / std})

    def __len__(self) -> int:
        return len(self._examples)

    def batches(self) -> Sequence[Batch]:
        return self._batches

    @property
    def labels(self) -> Tensor | None:
        return self._examples.labels

    @property
    def fingerprint(self) -> str:
        return f"{self._examples.fingerprint}-{self._kind}"

    def hashes(self) -> tuple[str, ...]:
        return tuple(f"{one}-{self._kind}" for one in self._examples.hashes())
