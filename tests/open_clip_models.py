"""Tiny open_clip models, and folders of them as open_clip itself writes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import open_clip
import torch
from open_clip.push_to_hf_hub import save_for_hf
from torch import Tensor, nn

from merging.backbones.open_clip import OpenClip, OpenClipConfig

MODEL: dict[str, Any] = {
    "embed_dim": 16,
    "quick_gelu": True,
    "vision_cfg": {
        "layers": 2,
        "width": 32,
        "head_width": 8,
        "patch_size": 8,
        "image_size": 32,
        "mlp_ratio": 2.0,
    },
    "text_cfg": {"context_length": 16, "vocab_size": 99, "width": 32, "heads": 4, "layers": 2},
}
PREPROCESS: dict[str, Any] = {"mean": [0.5, 0.5, 0.5], "std": [0.25, 0.25, 0.25]}
END = 98  # the largest id ends a text


def built(seed: int = 0, **changes: Any) -> open_clip.CLIP:
    """open_clip's own model, random."""
    torch.manual_seed(seed)
    settings = {**deepcopy(MODEL), **changes}
    custom = settings.pop("custom_text", False)
    model = (open_clip.CustomTextCLIP if custom else open_clip.CLIP)(**settings).eval()
    with torch.no_grad():  # of the size that training gives; open_clip starts biases at 0
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter += 0.1 * torch.randn(parameter.shape)
    return model


def backbone(folder: Path | None = None, **changes: Any) -> OpenClip:
    settings = {name: changes.pop(name) for name in ("split_attention",) if name in changes}
    config = OpenClipConfig({**deepcopy(MODEL), **changes}, PREPROCESS)
    return OpenClip(config, OpenClip.Settings(**settings), folder=folder)


class _NoTokenizer:
    def save_pretrained(self, folder: Path) -> None:
        """The tokenizer of these models is open_clip's own, which has no files."""


def saved(folder: Path, tensors: Mapping[str, Tensor], *, pickled: bool = False, **changes: Any) -> Path:
    """A folder as open_clip's save_for_hf leaves it."""
    settings = {**deepcopy(MODEL), **changes}
    model = built(**changes)
    model.load_state_dict(dict(tensors))
    open_clip.model.set_model_preprocess_cfg(model, {**PREPROCESS, "size": 32})
    save_for_hf(model, _NoTokenizer(), settings, str(folder), safe_serialization=not pickled)
    found = json.loads((folder / "open_clip_config.json").read_text())
    assert found["model_cfg"]["quick_gelu"] == settings["quick_gelu"]
    return folder


def texts(examples: int, seed: int = 0) -> Tensor:
    """Sentences of different length, ended by END and padded with 0."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, END, (examples, 16), generator=generator)
    for row, length in enumerate(torch.randint(3, 15, (examples,), generator=generator).tolist()):
        ids[row, length] = END
        ids[row, length + 1 :] = 0
    return ids


def features(model: nn.Module, images: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    with torch.no_grad():
        return model.encode_image(images), model.encode_text(ids)
