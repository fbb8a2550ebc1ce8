"""The backbone that base and experts share: opened, saved, and what heads read of it.

Shape letters: B examples, C channels, H and W height and width, F features.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import Dinov2Model
from transformers.utils import logging as transformers_logging

from merging.demo.vision.base_model import MEAN, STD
from merging.errors import CheckpointError

_BATCH = 128


def open_model(folder: Path) -> Dinov2Model:
    """A checkpoint of the demo, in evaluation mode; refused unless every weight has its place."""
    with _no_progress_bars():
        # With so few tokens, plain attention is faster than the fused kernels.
        model, info = Dinov2Model.from_pretrained(
            folder, attn_implementation="eager", output_loading_info=True, local_files_only=True
        )
    misfits = {kind: sorted(map(str, names)) for kind, names in info.items() if names}
    if misfits:
        raise CheckpointError(f"{folder} does not fit Dinov2Model of this transformers version: {misfits}")
    return model


def save_model(model: Dinov2Model, folder: Path) -> None:
    with _no_progress_bars():
        model.save_pretrained(folder)


def features(model: Dinov2Model, images_BCHW: Tensor) -> Tensor:
    """B F: the class token that the model ends with, for pictures on a scale from 0 to 1."""
    normalised = (images_BCHW - torch.tensor(MEAN).view(3, 1, 1)) / torch.tensor(STD).view(3, 1, 1)
    class_token_BF: Tensor = model(pixel_values=normalised).last_hidden_state[:, 0]
    return class_token_BF.float()


@torch.no_grad()
def features_of_all(model: Dinov2Model, pixels_BHWC: np.ndarray) -> Tensor:
    """B F, for any number of pictures in bytes."""
    starts = range(0, len(pixels_BHWC), _BATCH)
    return torch.cat([features(model, unit_scale(pixels_BHWC[start : start + _BATCH])) for start in starts])


def unit_scale(pixels_BHWC: np.ndarray) -> Tensor:
    """Bytes as numbers from 0 to 1: B C H W."""
    return torch.from_numpy(pixels_BHWC).permute(0, 3, 1, 2).float() / 255


@contextmanager
def _no_progress_bars() -> Iterator[None]:
    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()
