"""Tiny vision towers, as real as the large ones."""

from __future__ import annotations

import pytest
import torch
from transformers import CLIPVisionConfig, CLIPVisionModel, Dinov2Config, Dinov2Model

from merging.backbones.clip_vision import ClipVision
from merging.backbones.vit import ViT

SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 32,
    "patch_size": 8,
}


def _clip():
    config = CLIPVisionConfig(**SIZES, intermediate_size=64, architectures=["CLIPVisionModel"])
    return ClipVision(config), lambda: CLIPVisionModel(config)


def _dinov2():
    config = Dinov2Config(**SIZES, mlp_ratio=2, architectures=["Dinov2Model"])
    return ViT(config), lambda: Dinov2Model(config)


@pytest.fixture(params=[_clip, _dinov2], ids=["clip", "dinov2"])
def tower(request):
    """A backbone, and a function that makes a model of it for each seed."""
    backbone, make = request.param()

    def seeded(seed):
        torch.manual_seed(seed)
        return make().eval()

    return backbone, seeded
