"""What drift is measured on: examples that nothing was fitted on, as far as there are any."""

from __future__ import annotations

import json

import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from tiny_models import pixels
from tiny_texts import saved, sentences, written

from merging.data.opening import open_examples
from merging.data.spec import ImagesData, TensorsData
from merging.data.task import Task
from merging.data.text_spec import TextData
from merging.held_out import held_out


def tensors(folder, count, *, name="data", examples=None, repeated=0):
    values = pixels(count)["pixel_values"]
    if repeated:
        values[-repeated:] = values[:repeated]
    save_file({"pixel_values": values}, folder / f"{name}.safetensors")
    return TensorsData(path=folder / f"{name}.safetensors", examples=examples)


def opened(source, purpose="calibration", base=None):
    return open_examples(source, task="t", purpose=purpose, base_folder=base, seed=0, labelled=False)


def held_of(task, source, base, count=4):
    return held_out(task, source, base_folder=base, seed=0, count=count)


def test_the_next_of_the_file_are_taken(tmp_path):
    source = tensors(tmp_path, 20, examples=10)

    held = held_of(Task("t", opened(source)), source, tmp_path)

    assert held.origin == "spare"
    (batch,) = held.examples.batches()
    assert torch.equal(batch["pixel_values"], pixels(20)["pixel_values"][10:14])


def test_a_file_that_ends_gives_what_is_left(tmp_path):
    source = tensors(tmp_path, 12, examples=10)

    assert len(held_of(Task("t", opened(source)), source, tmp_path).examples) == 2


def test_spare_examples_that_were_fitted_in_another_place_do_not_count(tmp_path):
    source = tensors(tmp_path, 12, examples=9, repeated=2)
    calibration = opened(source)

    held = held_of(Task("t", calibration), source, tmp_path)

    assert len(held.examples) == 1
    assert not set(held.examples.hashes()) & set(calibration.hashes())


def test_a_calibration_that_takes_all_leaves_validation_then_test_then_itself(tmp_path):
    source = tensors(tmp_path, 8)
    calibration = opened(source)
    validation = opened(tensors(tmp_path, 6, name="validation"), "validation")
    test = opened(tensors(tmp_path, 7, name="test"), "test")

    found = [
        held_of(Task("t", calibration, test, validation=validation), source, tmp_path),
        held_of(Task("t", calibration, test), source, tmp_path),
        held_of(Task("t", calibration), source, tmp_path),
    ]

    assert [one.origin for one in found] == ["validation", "test", "fitted"]
    assert [len(one.examples) for one in found] == [6, 7, 8]
    assert held_of(Task("t"), None, tmp_path) is None


def test_pictures_go_on_in_the_order_of_the_draw(tmp_path):
    base = tmp_path / "base"
    base.mkdir()
    processor = {"image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": 8}}
    (base / "preprocessor_config.json").write_text(
        json.dumps({**processor, "crop_size": {"height": 8, "width": 8}})
    )
    for label in ("a", "b"):
        (tmp_path / "pictures" / label).mkdir(parents=True)
        for number in range(6):
            colour = (20 * number, 100 if label == "a" else 200, 0)
            Image.new("RGB", (8, 8), colour).save(tmp_path / "pictures" / label / f"{number}.png")
    few, more = (ImagesData(path=tmp_path / "pictures", examples=count) for count in (5, 9))

    held = held_of(Task("t", opened(few, base=base)), few, base)

    assert held.origin == "spare"
    assert held.examples.files == opened(more, base=base).files[5:]


def test_damaged_spare_pictures_stop_nothing(tmp_path):
    base = tmp_path / "base"
    base.mkdir()
    (base / "preprocessor_config.json").write_text('{"image_processor_type": "CLIPImageProcessor"}')
    (tmp_path / "pictures" / "a").mkdir(parents=True)
    for number in range(6):
        Image.new("RGB", (8, 8), (20 * number, 0, 0)).save(tmp_path / "pictures" / "a" / f"{number}.png")
    source = ImagesData(path=tmp_path / "pictures", examples=3)
    calibration = opened(source, base=base)
    for file in (tmp_path / "pictures" / "a").iterdir():
        if file not in calibration.files:
            file.write_bytes(b"no picture")

    held = held_of(Task("t", calibration), source, base)

    assert held.origin == "fitted"
    assert 'task "t": spare calibration data: 3 of 3 images cannot be used' in held.note


def test_texts_go_on_in_the_order_of_the_draw(tmp_path):
    saved(tmp_path, "bert")
    rows = written(tmp_path / "rows.jsonl", sentences(12))
    few, more = (TextData(path=rows, label="label", examples=count) for count in (5, 9))

    held = held_of(Task("t", opened(few, base=tmp_path / "base")), few, tmp_path / "base")

    expected = opened(more, base=tmp_path / "base")
    assert held.origin == "spare"
    assert held.examples.hashes() == expected.hashes()[5:]
    assert torch.equal(held.examples.labels, expected.labels[5:])


@pytest.mark.parametrize("count", [1, 3])
def test_labels_of_spare_tensors_are_theirs(tmp_path, count):
    labels = torch.arange(10)
    save_file({**pixels(10), "labels": labels}, tmp_path / "labelled.safetensors")
    source = TensorsData(path=tmp_path / "labelled.safetensors", examples=7)

    held = held_of(Task("t", opened(source)), source, tmp_path, count=count)

    assert torch.equal(held.examples.labels, labels[7 : 7 + count])
