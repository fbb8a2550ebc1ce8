"""Mild random changes of training pictures: turned, scaled, moved, brighter or darker.

Shape letters: B examples, C channels, H and W height and width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

_RADIANS, _SCALE, _SHIFT, _CONTRAST, _BRIGHTNESS = 0.15, 0.15, 0.1, 0.15, 0.1


def augmented(images_BCHW: Tensor, generator: torch.Generator) -> Tensor:
    """Another view of each picture, on a scale from 0 to 1 like the given."""

    def within(reach: float, *shape: int) -> Tensor:
        return (2 * torch.rand(shape, generator=generator) - 1) * reach

    count = len(images_BCHW)
    turn, scale, shift = within(_RADIANS, count), 1 + within(_SCALE, count), within(_SHIFT, count, 2)
    rows = [
        torch.stack([turn.cos() * scale, -turn.sin() * scale, shift[:, 0]], dim=1),
        torch.stack([turn.sin() * scale, turn.cos() * scale, shift[:, 1]], dim=1),
    ]
    grid = F.affine_grid(torch.stack(rows, dim=1), list(images_BCHW.shape), align_corners=False)
    moved = F.grid_sample(images_BCHW, grid, padding_mode="border", align_corners=False)
    contrast, brightness = 1 + within(_CONTRAST, count, 1, 1, 1), within(_BRIGHTNESS, count, 1, 1, 1)
    return (moved * contrast + brightness).clamp(0, 1)
