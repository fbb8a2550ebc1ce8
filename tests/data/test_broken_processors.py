"""An image processor of the base that spoils every picture: its file is named, once, before any work."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from transformers import CLIPImageProcessor

from merging.data.images import ImageExamples, image_processor
from merging.data.opening import open_examples
from merging.data.spec import ImagesData
from merging.errors import DataError, MergingError
from merging.task_opening import _TaskOpening


def saved(folder: Path, **changed: Any) -> Path:
    CLIPImageProcessor(size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16}).save_pretrained(
        folder
    )
    file = folder / "preprocessor_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changed}))
    for number in range(2):
        (folder / "data" / "a").mkdir(parents=True, exist_ok=True)
        picture = np.full((20, 20, 3), 90 * number, dtype=np.uint8)
        Image.fromarray(picture).save(folder / "data" / "a" / f"{number}.png")
    return folder


def opened(folder: Path, task: str = "x") -> Any:
    spec = ImagesData(path=folder / "data")
    return open_examples(spec, task=task, purpose="calibration", base_folder=folder, seed=0)


@pytest.mark.parametrize(
    "changed",
    [
        {"image_std": [0, 0, 0]},
        {"image_std": [0.2, 0.0, 0.2]},
        {"image_mean": [1e39, 0.0, 0.0]},
        {"rescale_factor": 1e300},
        {"image_mean": "a"},
    ],
)
def test_pixels_that_are_no_numbers_are_the_processors_fault(tmp_path: Path, changed: dict[str, Any]) -> None:
    saved(tmp_path, **changed)

    with pytest.raises(DataError) as caught:
        opened(tmp_path)

    assert str(tmp_path / "preprocessor_config.json") in str(caught.value)
    assert "Copy the file from the model" in str(caught.value)
    assert "0.png" not in str(caught.value)


def test_a_sound_processor_is_as_it_was(tmp_path: Path) -> None:
    saved(tmp_path)

    assert image_processor(tmp_path, "x") is not None
    assert len(opened(tmp_path)) == 2


def test_a_picture_that_alone_becomes_infinite_is_named(tmp_path: Path) -> None:
    saved(tmp_path)

    def spoils(*, images: Any, return_tensors: str) -> dict[str, Any]:
        import torch

        dark = np.asarray(images).max() == 0
        return {"pixel_values": torch.full((1, 3, 4, 4), float("nan") if dark else 1.0)}

    with pytest.raises(DataError, match=r"1 of 2 images cannot be used") as caught:
        ImageExamples(tmp_path / "data", where="x", task="x", processor=spoils, seed=0)

    assert "0.png: the base's image processor makes NaN or infinity of it" in str(caught.value)


def test_one_broken_processor_is_told_once_for_all_sources(tmp_path: Path) -> None:
    saved(tmp_path, image_std=[0, 0, 0])
    opening = _TaskOpening.__new__(_TaskOpening)
    opening.problems = []

    for task in ("a", "b", "c"):
        assert opening._attempt(f"tasks.{task}.calibration", opened, tmp_path, task) is None

    assert len(opening.problems) == 1
    assert opening.problems[0].where == "tasks.a.calibration"


def test_other_problems_are_told_for_each_source() -> None:
    opening = _TaskOpening.__new__(_TaskOpening)
    opening.problems = []

    def fails(task: str) -> None:
        raise MergingError(f"{task} has none")

    for task in ("a", "b"):
        opening._attempt(f"tasks.{task}.test", fails, task)

    assert len(opening.problems) == 2
