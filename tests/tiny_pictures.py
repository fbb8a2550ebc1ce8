"""A small ViT, experts, heads and folders of pictures: what a whole run on images reads."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers as hf
from PIL import Image
from safetensors.torch import save_file
from tiny_models import PICTURE, SIZE

CLASSES = ("a", "b", "c", "d", "e")


def pictures(folder: Path, classes: Sequence[str], each: int = 3, seed: int = 0) -> Path:
    """A folder per class, of noise."""
    random = np.random.default_rng(seed)
    for name in classes:
        (folder / name).mkdir(parents=True)
        for number in range(each):
            noise = random.integers(0, 256, (36, 36, 3), dtype=np.uint8)
            Image.fromarray(noise).save(folder / name / f"{number}.png")
    return folder


def picture_suite(
    folder: Path, tasks: Sequence[str] = ("digits",), model: Any = hf.ViTModel, **config: Any
) -> dict[str, Any]:
    """A spec with a base, an expert a task, pictures in img/TASK/{train,test} and a linear head of 5 classes;
    all of it lies in `folder`."""
    torch.manual_seed(0)
    base = model(model.config_class(**{**SIZE, **PICTURE, "num_hidden_layers": 2, **config}))
    base.save_pretrained(folder / "base")
    hf.ViTImageProcessor(size={"height": 32, "width": 32}).save_pretrained(folder / "base")
    spec: dict[str, Any] = {
        "base": str(folder / "base"),
        "experts": {},
        "merge": {"type": "average"},
        "tasks": {},
        "device": "cpu",
        "output": {"path": str(folder / "out")},
    }
    for number, task in enumerate(tasks):
        torch.manual_seed(number + 1)
        with torch.no_grad():
            for parameter in base.parameters():
                parameter.add_(0.01 * torch.randn_like(parameter))
        base.save_pretrained(folder / task)
        (folder / "heads").mkdir(exist_ok=True)
        save_file({"weight": torch.randn(5, SIZE["hidden_size"])}, folder / "heads" / f"{task}.safetensors")
        spec["experts"][task] = str(folder / task)
        spec["tasks"][task] = {
            split if split == "test" else "calibration": {
                "type": "images",
                "path": str(pictures(folder / "img" / task / split, CLASSES, seed=seed)),
            }
            for seed, split in enumerate(("train", "test"), start=10 * number)
        }
        head = {"type": "linear", "path": str(folder / "heads" / f"{task}.safetensors")}
        spec["tasks"][task]["head"] = head
    return spec
