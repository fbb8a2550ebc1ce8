"""CLIP as open_clip defines it, with a forward that takes images, texts or both.

Shape letters: B examples, F final feature.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from open_clip.model import CLIP, CustomTextCLIP
from torch import Tensor, nn


class Features(NamedTuple):
    """Projected features (B F) as they come, not normalised; None for what was not given."""

    image: Tensor | None
    text: Tensor | None


class _Towers(nn.Module):
    def forward(self, pixel_values: Tensor | None = None, input_ids: Tensor | None = None) -> Features:
        model: Any = self
        return Features(
            None if pixel_values is None else model.encode_image(pixel_values),
            None if input_ids is None else model.encode_text(input_ids),
        )


class Towers(_Towers, CLIP):
    """open_clip.CLIP."""


class CustomTextTowers(_Towers, CustomTextCLIP):
    """open_clip.CustomTextCLIP, whose text tower is a module of its own."""
