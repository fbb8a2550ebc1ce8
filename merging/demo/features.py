"""What a head reads of a picture: the backbone's last class token."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from transformers import Dinov2Model

from merging.demo.base_model import MEAN, STD

_BATCH = 128


def normalised(pixels: np.ndarray | Tensor) -> Tensor:
    """Bytes [B, height, width, 3] as the image processor hands them to the model: [B, 3, height, width]."""
    return standardised(torch.as_tensor(pixels).permute(0, 3, 1, 2).float() / 255)


def standardised(images_BCHW: Tensor) -> Tensor:
    return (images_BCHW - torch.tensor(MEAN).view(3, 1, 1)) / torch.tensor(STD).view(3, 1, 1)


def features(model: Dinov2Model, images_BCHW: Tensor) -> Tensor:
    """B F."""
    return model(pixel_values=images_BCHW).last_hidden_state[:, 0].float()


@torch.no_grad()
def all_features(model: Dinov2Model, pixels: np.ndarray) -> Tensor:
    """B F, for any number of pictures."""
    model.eval()
    batches = torch.from_numpy(pixels).split(_BATCH)
    return torch.cat([features(model, normalised(batch)) for batch in batches])
