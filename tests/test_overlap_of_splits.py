"""Test examples that are calibration examples too are found by content, in whatever file they lie."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from tiny_texts import saved, sentences, written
from transformers import CLIPImageProcessor

from merging.data.hashing import Shared, overlap, shared_examples
from merging.data.opening import open_examples
from merging.data.spec import ImagesData, TensorsData
from merging.data.task import Examples, Task
from merging.data.text_spec import TextData
from merging.sufficiency import overlap_findings


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    saved(folder, "llama")
    side = {"height": 16, "width": 16}
    CLIPImageProcessor(size={"shortest_edge": 16}, crop_size=side).save_pretrained(folder / "base")
    return folder / "base"


def opened(source: Any, base: Path) -> Examples:
    return open_examples(source, task="one", purpose="calibration", base_folder=base, seed=0, labelled=False)


def tensors(path: Path, base: Path, **inputs: torch.Tensor) -> Examples:
    save_file({name: value.contiguous() for name, value in inputs.items()}, path)
    return opened(TensorsData(path=path), base)


def pictures(folder: Path, base: Path) -> Examples:
    random = np.random.default_rng(0)
    (folder / "a").mkdir(parents=True)
    for number in range(4):
        pixels = random.integers(0, 256, (20, 24, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / "a" / f"{number}.png")
    return opened(ImagesData(path=folder), base)


def texts(path: Path, base: Path, rows: list[dict[str, Any]]) -> Examples:
    return opened(TextData(path=written(path, rows)), base)


def both(examples: Examples, name: str) -> torch.Tensor:
    return torch.cat([batch[name] for batch in examples.batches()])


def task(name: str, **splits: Examples) -> Task:
    return Task(name, **splits)


@pytest.mark.parametrize("kind", ["images", "text"])
def test_the_same_example_is_known_in_every_type_of_source(tmp_path: Path, base: Path, kind: str) -> None:
    if kind == "images":
        given = pictures(tmp_path / "pictures", base)
        pixels = both(given, "pixel_values")
        other = tensors(tmp_path / "x.safetensors", base, pixel_values=torch.cat([pixels[1:3], pixels + 1]))
    else:
        given = texts(tmp_path / "x.jsonl", base, sentences(4))
        (batch,) = given.batches()
        ids, mask = (torch.nn.functional.pad(batch[name], (0, 3)) for name in ("input_ids", "attention_mask"))
        ids[0, -1] = 9  # in the padding, which no model sees
        ids[2:, 1] += 1
        other = tensors(tmp_path / "x.safetensors", base, input_ids=ids, attention_mask=mask)

    assert overlap(given, other) == 2
    assert overlap(other, given) == 2


def test_padding_on_the_left_and_another_batch_are_the_same_example(tmp_path: Path, base: Path) -> None:
    right = torch.tensor([[5, 6, 7, 0], [5, 6, 0, 0]])
    left = torch.tensor([[0, 5, 6, 7], [0, 0, 5, 7]])
    one = tensors(tmp_path / "a.safetensors", base, input_ids=right, attention_mask=(right > 0).long())
    other = tensors(tmp_path / "b.safetensors", base, input_ids=left, attention_mask=left > 0)

    assert overlap(one, other) == 1
    assert one.fingerprint != other.fingerprint


def test_a_half_precision_copy_of_the_same_numbers_is_the_same_example(tmp_path: Path, base: Path) -> None:
    pixels = torch.randn(3, 3, 16, 16).half()
    one = tensors(tmp_path / "a.safetensors", base, pixel_values=pixels)
    other = tensors(tmp_path / "b.safetensors", base, pixel_values=pixels.float())

    assert overlap(one, other) == 3


def test_what_a_decoder_is_given_does_not_make_another_example(tmp_path: Path, base: Path) -> None:
    ids = torch.tensor([[5, 6, 7], [8, 9, 10]])
    one = tensors(tmp_path / "a.safetensors", base, input_ids=ids, decoder_input_ids=ids + 20)
    other = tensors(tmp_path / "b.safetensors", base, input_ids=ids)

    assert overlap(one, other) == 2


def test_examples_of_another_tasks_calibration_count_and_name_it(tmp_path: Path, base: Path) -> None:
    pixels = torch.randn(6, 3, 16, 16)
    mine, theirs, test = (
        tensors(tmp_path / f"{name}.safetensors", base, pixel_values=part)
        for name, part in {"mine": pixels[:2], "theirs": pixels[2:4], "test": pixels[3:]}.items()
    )
    tasks = {
        "one": task("one", calibration=mine, test=test),
        "two": task("two", calibration=theirs),
        "three": task("three", test=mine),
    }

    assert shared_examples(tasks) == {"one": Shared(1, ("two",)), "three": Shared(2, ("one",))}
    first, second = overlap_findings(tasks)
    assert first.stops
    assert '1 of 3 test examples are calibration examples of task "two" too' in first.problem.what
    assert second.problem.where == "tasks.three"


def test_splits_without_a_common_example_are_not_spoken_of(tmp_path: Path, base: Path) -> None:
    pixels = torch.randn(6, 3, 16, 16)
    calibration = tensors(tmp_path / "a.safetensors", base, pixel_values=pixels[:3])
    test = tensors(tmp_path / "b.safetensors", base, pixel_values=pixels[3:])

    assert overlap_findings({"one": task("one", calibration=calibration, test=test)}) == []


@pytest.mark.parametrize(("tests", "stops"), [(99, True), (100, False)])
def test_a_share_that_cannot_move_the_score_by_more_than_a_point_only_warns(
    tmp_path: Path, base: Path, tests: int, stops: bool
) -> None:
    pixels = torch.randn(tests + 1, 3, 4, 4)
    calibration = tensors(tmp_path / "a.safetensors", base, pixel_values=pixels[:2])
    test = tensors(tmp_path / "b.safetensors", base, pixel_values=pixels[1:])

    (finding,) = overlap_findings({"one": task("one", calibration=calibration, test=test)})

    assert finding.problem.what.startswith(f"1 of {tests} test examples")
    assert finding.stops == stops
