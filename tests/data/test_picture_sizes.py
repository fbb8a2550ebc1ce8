"""Pictures of a size that the model does not take are refused before the work; where it takes any, not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers as hf
from safetensors.torch import save_file
from tiny_pictures import picture_suite

from merging.errors import DataError
from merging.pipeline import Pipeline


def resize(folder: Path, side: int) -> None:
    hf.ViTImageProcessor(size={"height": side, "width": side}).save_pretrained(folder / "base")


def test_a_processor_of_another_size_than_the_models_is_refused_once(tmp_path: Path) -> None:
    spec = picture_suite(tmp_path, ("digits", "letters"))
    resize(tmp_path, 64)

    with pytest.raises(DataError) as caught:
        Pipeline.from_spec(spec).tasks()

    (problem,) = caught.value.problems
    assert problem.where == "tasks.digits.calibration"
    assert "its pictures are 3 x 64 x 64, the model takes 3 x 32 x 32" in problem.what
    assert "preprocessor_config.json" in problem.remedy


def test_ready_made_inputs_of_another_size_are_refused_too(tmp_path: Path) -> None:
    spec = picture_suite(tmp_path)
    save_file({"pixel_values": torch.zeros(4, 3, 40, 32)}, tmp_path / "x.safetensors")
    task = spec["tasks"]["digits"]
    task["calibration"] = {"type": "tensors", "path": str(tmp_path / "x.safetensors")}

    with pytest.raises(DataError, match=r"tasks\.digits\.calibration: its pictures are 3 x 40 x 32"):
        Pipeline.from_spec(spec).tasks()


def test_a_model_that_interpolates_positions_takes_other_sizes(tmp_path: Path) -> None:
    spec = picture_suite(tmp_path, model=hf.Dinov2Model)
    resize(tmp_path, 64)

    assert Pipeline.from_spec(spec).tasks()["digits"].test is not None
