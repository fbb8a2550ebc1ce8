"""Heads and experts, on a DINOv2 of two blocks and sixteen dimensions."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from transformers import Dinov2Config, Dinov2Model

from merging.demo.vision.augmentation import augmented
from merging.demo.vision.backbone import open_model, save_model
from merging.demo.vision.drawing import PIXELS
from merging.demo.vision.experts import train_expert
from merging.demo.vision.heads import head_of, prototype_head
from merging.demo.vision.tasks import Pictures
from merging.errors import CheckpointError


def ignore(done: int, total: int) -> None:
    """Progress that no test looks at."""


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    config = Dinov2Config(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, patch_size=14, image_size=PIXELS
    )
    folder = tmp_path_factory.mktemp("base")
    save_model(Dinov2Model(config), folder)
    return folder


@pytest.fixture(scope="module")
def pictures() -> Pictures:
    dice = np.random.default_rng(0)
    pixels = dice.integers(0, 256, size=(12, PIXELS, PIXELS, 3), dtype=np.uint8)
    return Pictures(pixels, np.arange(12) % 3)


def test_a_head_decides_as_the_cosine_to_prototypes_does() -> None:
    generator = torch.Generator().manual_seed(0)
    features, labels = torch.randn(60, 8, generator=generator) + 5, torch.arange(60) % 4
    head = prototype_head(features, labels, 4)

    logits = F.linear(features, head["weight"], head["bias"])

    means = torch.stack([features[labels == label].mean(0) for label in range(4)])
    centred, prototypes = features - means.mean(0), means - means.mean(0)
    cosines = F.cosine_similarity(centred[:, None], prototypes[None], dim=2)
    assert torch.equal(logits.argmax(1), cosines.argmax(1))


def test_the_same_seed_gives_the_same_expert(base: Path, pictures: Pictures, tmp_path: Path) -> None:
    head = head_of(base, pictures, 3)
    for name, seed in {"first": 0, "again": 0, "other": 1}.items():
        train_expert(base, pictures, head, tmp_path / name, steps=3, seed=seed, report=ignore)

    first, again, other = (
        load_file(tmp_path / name / "model.safetensors") for name in ("first", "again", "other")
    )

    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not all(torch.equal(first[name], other[name]) for name in first)


def test_an_expert_has_the_names_and_types_of_the_base(
    base: Path, pictures: Pictures, tmp_path: Path
) -> None:
    seen: list[tuple[int, int]] = []
    head = head_of(base, pictures, 3)

    train_expert(
        base, pictures, head, tmp_path / "expert", steps=2, seed=0, report=lambda *at: seen.append(at)
    )

    before, after = (
        load_file(base / "model.safetensors"),
        load_file(tmp_path / "expert" / "model.safetensors"),
    )
    assert before.keys() == after.keys()
    assert {tensor.dtype for tensor in after.values()} == {torch.float32}
    assert seen == [(0, 2), (1, 2), (2, 2)]


def test_training_leaves_the_global_seed_alone(base: Path, pictures: Pictures, tmp_path: Path) -> None:
    head = head_of(base, pictures, 3)
    torch.manual_seed(7)
    expected = torch.rand(1)
    torch.manual_seed(7)

    train_expert(base, pictures, head, tmp_path / "expert", steps=1, seed=0, report=ignore)

    assert torch.equal(torch.rand(1), expected)


def test_a_checkpoint_that_lacks_weights_is_refused(base: Path, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    weights = load_file(base / "model.safetensors")
    del weights["layernorm.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_bytes((base / "config.json").read_bytes())

    with pytest.raises(CheckpointError, match=r"layernorm\.weight"):
        open_model(tmp_path)


def test_augmented_pictures_stay_on_the_scale() -> None:
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(4, 3, PIXELS, PIXELS, generator=generator)

    changed = augmented(images, generator)

    assert changed.shape == images.shape
    assert 0 <= changed.min() < changed.max() <= 1
