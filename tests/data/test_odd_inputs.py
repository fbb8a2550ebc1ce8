"""Inputs that a model's forward names and few examples give, and such as it does not know."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from safetensors.torch import save_file
from tiny_models import DINOV2, PICTURE, SIZE, expert_of, pixels
from torch import Tensor, nn

from merging.errors import DataError
from merging.pipeline import Pipeline

LAYERS = {"num_hidden_layers": 1}
VIT = {**SIZE, **PICTURE, **LAYERS, "encoder_stride": 8}
CASES: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "vit": (lambda: hf.ViTModel(hf.ViTConfig(**VIT)), 32),
    "vit for masked images": (lambda: hf.ViTForMaskedImageModeling(hf.ViTConfig(**VIT)), 32),
    "dinov2": (lambda: hf.Dinov2Model(hf.Dinov2Config(**DINOV2 | LAYERS)), 28),
    "dinov2 without a token": (
        lambda: hf.Dinov2Model(hf.Dinov2Config(**DINOV2 | LAYERS, use_mask_token=False)),
        28,
    ),
}


def spec_of(folder: Path, kind: str, merge: str, **more: Tensor) -> dict[str, Any]:
    make, side = CASES[kind]
    torch.manual_seed(0)
    base = make().eval()
    base.save_pretrained(folder / "base")
    for seed, name in enumerate(("expert", "other"), start=1):
        expert = make().eval()
        expert.load_state_dict(expert_of(base, seed, noise=0.02))
        expert.save_pretrained(folder / name)
    save_file({**pixels(4, side), **more}, folder / "x.safetensors")
    save_file({"weight": torch.randn(3, 32)}, folder / "head.safetensors")
    data = {"type": "tensors", "path": str(folder / "x.safetensors")}
    save_file(
        {**pixels(4, side, seed=1), **more, "labels": torch.tensor([0, 1, 2, 0])}, folder / "y.safetensors"
    )
    head = {"type": "linear", "path": str(folder / "head.safetensors")}
    task = {"calibration": data, "test": {**data, "path": str(folder / "y.safetensors")}, "head": head}
    return {
        "base": str(folder / "base"),
        "experts": {"task": str(folder / "expert"), "other": str(folder / "other")},
        "merge": merge,
        "tasks": {"task": task, "other": {"calibration": data}},
        "device": "cpu",
        "output": {"path": str(folder / "out")},
    }


def mask(kind: str) -> Tensor:
    patches = 4 if "dinov2" in kind else 16
    return torch.arange(4 * patches).reshape(4, patches) % 3 == 0


@pytest.mark.parametrize("merge", ["average", "regmean"])
@pytest.mark.parametrize("kind", ["vit", "dinov2 without a token"])
def test_a_mask_of_patches_is_refused_where_the_model_has_no_token_for_them(
    tmp_path: Path, kind: str, merge: str
) -> None:
    spec = spec_of(tmp_path, kind, merge, bool_masked_pos=mask(kind))

    with pytest.raises(DataError) as caught:
        Pipeline.from_spec(spec).run()

    places = [one.where for one in caught.value.problems]
    assert places == ["tasks.task.calibration", "tasks.task.test", "tasks.other.calibration"]
    assert 'fails on the input "bool_masked_pos", and runs without it' in str(caught.value)
    assert "Leave it out of the file" in str(caught.value)
    assert caught.value.exit_code == 2
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("kind", ["vit for masked images", "dinov2"])
def test_a_mask_of_patches_reaches_a_model_that_takes_one(tmp_path: Path, kind: str) -> None:
    spec = spec_of(tmp_path, kind, "regmean", bool_masked_pos=mask(kind))

    report = Pipeline.from_spec(spec).run()

    assert report.tasks["task"].scores.merged is not None
    plain = spec_of(tmp_path / "plain", kind, "regmean")
    Pipeline.from_spec(plain).run()
    weights = [at / "merged" / "model.safetensors" for at in (tmp_path / "out", tmp_path / "plain" / "out")]
    assert weights[0].read_bytes() != weights[1].read_bytes()


def test_a_mask_of_another_number_of_patches_is_refused(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, "dinov2", "regmean", bool_masked_pos=torch.zeros(4, 7, dtype=torch.bool))

    with pytest.raises(DataError, match='fails on the input "bool_masked_pos"'):
        Pipeline.from_spec(spec).run()


@pytest.mark.parametrize("name", ["bool_mask_pos", "anything", "pixel_value"])
def test_inputs_that_the_model_does_not_take_are_refused_by_name(tmp_path: Path, name: str) -> None:
    spec = spec_of(tmp_path, "dinov2", "average", **{name: torch.zeros(4, 2)})

    with pytest.raises(DataError, match=f'the model takes no input "{name}"'):
        Pipeline.from_spec(spec).run()
