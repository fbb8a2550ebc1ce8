from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import CLIPImageProcessor

from merging.data.hashing import overlap
from merging.data.images import ImageExamples, image_processor
from merging.data.opening import open_examples
from merging.data.spec import ImagesData
from merging.errors import DataError


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base")
    side = {"height": 16, "width": 16}
    CLIPImageProcessor(size={"shortest_edge": 16}, crop_size=side).save_pretrained(folder)
    return folder


def drawn(folder, counts, *, seed=0, suffix="png"):
    random = np.random.default_rng(seed)
    for name, count in counts.items():
        (folder / name).mkdir(parents=True)
        for number in range(count):
            pixels = random.integers(0, 256, (20, 24, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{number:02}.{suffix}")
    return folder


def opened(folder, base, *, task="mnist", purpose="test", seed=0, **settings):
    spec = ImagesData(path=folder, **settings)
    return open_examples(spec, task=task, purpose=purpose, base_folder=base, seed=seed)


def test_labels_are_positions_of_the_sorted_folders(tmp_path, base):
    folder = drawn(tmp_path / "data", {"zebra": 2, "ant": 1, "cat": 3})

    examples = opened(folder, base)

    assert examples.classes == ("ant", "cat", "zebra")
    assert [examples.classes[label] for label in examples.labels] == [
        file.parent.name for file in examples.files
    ]
    assert len(examples) == 6


def test_pixels_are_those_of_the_bases_processor(tmp_path, base):
    folder = drawn(tmp_path / "data", {"a": 3, "b": 3})

    examples = opened(folder, base, batch_size=4)
    batches = list(examples.batches())

    processor = CLIPImageProcessor.from_pretrained(base)
    expected = [
        processor(images=Image.open(file), return_tensors="pt")["pixel_values"] for file in examples.files
    ]
    assert [len(batch["pixel_values"]) for batch in batches] == [4, 2]
    assert torch.equal(torch.cat([batch["pixel_values"] for batch in batches]), torch.cat(expected))


def test_a_draw_is_balanced_and_fixed(tmp_path, base):
    folder = drawn(tmp_path / "data", {"a": 9, "b": 9, "c": 1})

    one, again = opened(folder, base, examples=11), opened(folder, base, examples=11)

    assert sorted(Counter(one.labels.tolist()).values()) == [1, 5, 5]
    assert one.files == again.files
    assert one.fingerprint == again.fingerprint


def test_a_draw_depends_on_seed_and_task(tmp_path, base):
    folder = drawn(tmp_path / "data", {"a": 9, "b": 9})

    files = [opened(folder, base, examples=6, seed=seed, task=task).files for seed in (0, 1) for task in "xy"]

    assert len(set(files)) == 4


def test_a_small_draw_is_the_beginning_of_a_larger_one(tmp_path, base):
    folder = drawn(tmp_path / "data", {"a": 9, "b": 4})

    small, all_of_them = opened(folder, base, examples=5), opened(folder, base)

    assert small.files == all_of_them.files[:5]


def test_more_asked_for_than_there_are(tmp_path, base):
    examples = opened(drawn(tmp_path / "data", {"a": 2, "b": 1}), base, examples=10)

    assert (len(examples), examples.asked) == (3, 10)
    assert any("10 examples asked for, 3 used" in note for note in examples.notes)


def test_pixels_too_large_to_keep_are_processed_again(tmp_path, base):
    folder = drawn(tmp_path / "data", {"a": 3, "b": 3})
    kept = opened(folder, base)

    processor = image_processor(base, "test data")
    examples = ImageExamples(
        folder, where="test data", task="mnist", processor=processor, seed=0, cache_bytes=100
    )

    assert examples._pixels is None
    assert torch.equal(examples.batches()[0]["pixel_values"], kept.batches()[0]["pixel_values"])
    assert examples.fingerprint == kept.fingerprint


def test_overlap_is_found_under_other_names_and_formats(tmp_path, base):
    train = drawn(tmp_path / "train", {"a": 4, "b": 4})
    test = drawn(tmp_path / "test", {"a": 4, "b": 4}, seed=1)
    with Image.open(train / "a" / "01.png") as image:
        image.save(test / "b" / "other.bmp")

    assert overlap(opened(train, base), opened(test, base)) == 1


def test_grey_palette_and_transparent_images_become_rgb(tmp_path, base):
    folder = drawn(tmp_path / "data", {"a": 1})
    grey = Image.fromarray(np.full((20, 20), 90, dtype=np.uint8))
    grey.save(folder / "a" / "grey.png")
    palette = grey.convert("RGB").quantize(4)
    palette.save(folder / "a" / "palette.png", transparency=b"\x00\x80\xff\xff")
    grey.convert("RGBA").save(folder / "a" / "alpha.webp")

    assert opened(folder, base).batches()[0]["pixel_values"].shape == (4, 3, 16, 16)


def test_damaged_images_are_all_named(tmp_path, base):
    folder = drawn(tmp_path / "data", {"a": 3, "b": 2})
    (folder / "a" / "01.png").write_bytes((folder / "a" / "01.png").read_bytes()[:300])
    (folder / "b" / "00.png").write_text("no image at all")

    with pytest.raises(DataError, match="2 of 5 images cannot be used") as caught:
        opened(folder, base)

    assert {problem.where for problem in caught.value.problems} == {
        str(folder / "a" / "01.png"),
        str(folder / "b" / "00.png"),
    }


def test_empty_class_folders_keep_their_index_and_are_noted(tmp_path, base):
    folder = drawn(tmp_path / "data", {"a": 0, "b": 2})
    (folder / ".hidden").mkdir()

    examples = opened(folder, base)

    assert examples.classes == ("a", "b")
    assert examples.labels.tolist() == [1, 1]
    assert any("no images in class folders a" in note for note in examples.notes)


def test_base_without_processor(tmp_path):
    folder = drawn(tmp_path / "data", {"a": 1})

    with pytest.raises(DataError, match="has no image processor"):
        opened(folder, tmp_path)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda folder: None, "does not exist"),
        (lambda folder: folder.write_text(""), "is a file, expected a folder"),
        (lambda folder: folder.mkdir(), "has no folders, expected one folder per class"),
        (lambda folder: (folder / "a").mkdir(parents=True), "has 1 folders without images"),
    ],
)
def test_folders_that_are_no_examples(tmp_path, base, make, words):
    make(tmp_path / "data")

    with pytest.raises(DataError, match=words):
        opened(tmp_path / "data", base)


def test_links_that_lead_nowhere_are_pictures_that_cannot_be_used(tmp_path, base):
    folder = drawn(tmp_path / "data", {"a": 3, "b": 3})
    (folder / "a" / "lost.png").symlink_to("nowhere.png")

    with pytest.raises(DataError, match="1 of 7 images cannot be used") as caught:
        opened(folder, base)

    assert 'lost.png: a link to "nowhere.png", which is not there' in str(caught.value)


def test_a_class_folder_that_is_a_link_to_nowhere_is_told(tmp_path, base):
    folder = drawn(tmp_path / "data", {"a": 3, "b": 3})
    (folder / "c").symlink_to("nowhere")

    with pytest.raises(DataError, match=r"1 of what lies in .* links that lead nowhere"):
        opened(folder, base)
