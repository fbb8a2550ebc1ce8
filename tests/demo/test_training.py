"""Experts in processes of their own."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import Dinov2Config, Dinov2Model

from merging.demo.vision.backbone import save_model
from merging.demo.vision.drawing import PIXELS
from merging.demo.vision.tasks import Pictures
from merging.demo.vision.training import Training, train_side_by_side
from merging.errors import MergingError


def a_training(folder: Path, name: str, *, steps: int) -> Training:
    torch.manual_seed(0)
    config = Dinov2Config(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, patch_size=14, image_size=PIXELS
    )
    save_model(Dinov2Model(config), folder / "base")
    pixels = np.random.default_rng(0).integers(0, 256, size=(4, PIXELS, PIXELS, 3), dtype=np.uint8)
    pictures = Pictures(pixels, np.array([0, 1, 0, 1]))
    return Training(
        folder / "base", pictures, 2, folder / "heads" / f"{name}.safetensors", folder / name, steps, seed=0
    )


def test_experts_are_made_and_every_step_is_counted(tmp_path: Path) -> None:
    trainings = [a_training(tmp_path, "first", steps=2), a_training(tmp_path, "second", steps=3)]
    seen: list[tuple[int, int]] = []

    train_side_by_side(trainings, lambda *at: seen.append(at))

    names = load_file(tmp_path / "base" / "model.safetensors").keys()
    assert all(
        load_file(tmp_path / name / "model.safetensors").keys() == names for name in ("first", "second")
    )
    assert load_file(tmp_path / "heads" / "first.safetensors")["weight"].shape == (2, 16)
    assert seen == sorted(seen)
    assert seen[-1] == (5, 5)


def test_a_training_that_fails_says_which_and_why_and_leaves_nothing(tmp_path: Path) -> None:
    training = a_training(tmp_path, "digits", steps=1)
    training.head.parent.mkdir()
    training.head.write_text("not a head")

    with pytest.raises(MergingError, match=r"making the expert digits ended with code 1: .*Safetensor"):
        train_side_by_side([training], lambda *_: None)

    assert sorted(path.name for path in tmp_path.iterdir()) == ["base", "heads"]


def test_nothing_to_train_is_no_work(tmp_path: Path) -> None:
    train_side_by_side([], lambda *_: None)
