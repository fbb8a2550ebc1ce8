from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file

from merging.data.hashing import overlap
from merging.data.opening import open_examples
from merging.data.spec import TensorsData
from merging.errors import DataError


def stored(path, **tensors):
    save_file(tensors, path)
    return path


def opened(path, *, purpose="calibration", **settings):
    spec = TensorsData(path=path, **settings)
    return open_examples(spec, task="mnist", purpose=purpose, base_folder=None, seed=0)


@pytest.fixture
def pixels():
    return torch.randn(10, 3, 4, 4, generator=torch.Generator().manual_seed(0))


def test_examples_come_as_stored_and_in_order(tmp_path, pixels):
    path = stored(tmp_path / "x.safetensors", pixel_values=pixels, labels=torch.arange(10))

    examples = opened(path, batch_size=4)

    assert [len(batch["pixel_values"]) for batch in examples.batches()] == [4, 4, 2]
    assert torch.equal(torch.cat([batch["pixel_values"] for batch in examples.batches()]), pixels)
    assert torch.equal(examples.labels, torch.arange(10))
    assert all(batch.keys() == {"pixel_values"} for batch in examples.batches())


def test_batches_can_be_indexed_and_sliced_like_a_tuple(tmp_path, pixels):
    batches = opened(stored(tmp_path / "x.safetensors", pixel_values=pixels), batch_size=4).batches()

    assert len(batches[1:]) == 2
    assert torch.equal(batches[-1]["pixel_values"], pixels[8:])
    assert torch.equal(batches[1:][0]["pixel_values"], pixels[4:8])
    assert torch.equal(batches[1:][:1][-1]["pixel_values"], pixels[4:8])
    with pytest.raises(IndexError):
        batches[3]


def test_the_first_so_many_are_used(tmp_path, pixels):
    path = stored(tmp_path / "x.safetensors", pixel_values=pixels, labels=torch.arange(10))

    examples = opened(path, examples=5, batch_size=4)

    assert len(examples) == 5
    assert torch.equal(examples.labels, torch.arange(5))
    assert torch.equal(examples.batches()[-1]["pixel_values"], pixels[4:5])
    assert not examples.notes


def test_fewer_examples_than_asked_for_are_noted(tmp_path, pixels):
    examples = opened(stored(tmp_path / "x.safetensors", pixel_values=pixels), examples=256)

    assert (examples.asked, len(examples)) == (256, 10)
    assert any("256 examples asked for, 10 used" in note for note in examples.notes)


def test_repeated_examples_are_noted(tmp_path, pixels):
    path = stored(tmp_path / "x.safetensors", pixel_values=torch.cat([pixels, pixels[:3]]))

    assert any("3 of 13 examples repeat" in note for note in opened(path).notes)


def test_fingerprint_follows_content_and_order_but_not_batches(tmp_path, pixels):
    one = opened(stored(tmp_path / "a.safetensors", pixel_values=pixels), batch_size=3)
    same = opened(stored(tmp_path / "b.safetensors", pixel_values=pixels), batch_size=7)
    turned = opened(stored(tmp_path / "c.safetensors", pixel_values=pixels.flip(0)))
    labelled = opened(stored(tmp_path / "d.safetensors", pixel_values=pixels, labels=torch.arange(10)))

    assert one.fingerprint == same.fingerprint
    assert len({one.fingerprint, turned.fingerprint, labelled.fingerprint}) == 3
    assert one.hashes() == labelled.hashes()


def test_overlap_is_counted_by_content(tmp_path, pixels):
    calibration = opened(stored(tmp_path / "a.safetensors", pixel_values=pixels[:6]))
    test = opened(stored(tmp_path / "b.safetensors", pixel_values=pixels[4:].flip(0)))

    assert overlap(calibration, test) == 2
    assert overlap(calibration, calibration) == 6


def test_bfloat16_and_integer_inputs_are_hashed_as_they_are(tmp_path):
    ids, mask = torch.arange(12).view(4, 3), torch.ones(4, 3, dtype=torch.bool)
    path = stored(
        tmp_path / "x.safetensors", input_ids=ids, attention_mask=mask, extra=torch.ones(4).bfloat16()
    )

    examples = opened(path)

    assert len(set(examples.hashes())) == 4
    assert examples.batches()[0]["extra"].dtype == torch.bfloat16


def test_missing_file(tmp_path):
    with pytest.raises(
        DataError, match=r'task "mnist": calibration data: .*none\.safetensors does not exist'
    ):
        opened(tmp_path / "none.safetensors")


def test_folder_instead_of_file(tmp_path):
    with pytest.raises(DataError, match="is a folder, expected a safetensors file"):
        opened(tmp_path)


def test_pickle_is_refused_unopened(tmp_path):
    torch.save({"pixel_values": torch.zeros(2)}, tmp_path / "x.pt")

    with pytest.raises(DataError, match=r"(?s)can run code.*save_file"):
        opened(tmp_path / "x.pt")


def test_cut_off_file(tmp_path, pixels):
    path = stored(tmp_path / "x.safetensors", pixel_values=pixels)
    path.write_bytes(path.read_bytes()[:-10])

    with pytest.raises(DataError, match="not a whole safetensors file"):
        opened(path)


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ({"pixel_values": torch.zeros(0, 3)}, "is empty"),
        ({"labels": torch.zeros(3)}, "has no inputs"),
        ({"a": torch.zeros(3, 1), "b": torch.zeros(4, 1)}, "first axes .* differ.*a 3, b 4"),
        ({"a": torch.zeros(3, 1), "labels": torch.zeros(4)}, "first axes .* differ"),
        ({"a": torch.tensor(1.0)}, '"a" .* is a number'),
    ],
)
def test_shapes_that_are_no_examples(tmp_path, tensors, words):
    with pytest.raises(DataError, match=words):
        opened(stored(tmp_path / "x.safetensors", **tensors))


def test_values_that_are_not_finite_are_counted_by_tensor(tmp_path, pixels):
    pixels[2, 0, 0, 0], pixels[9, 1, 1, 1] = float("nan"), float("inf")

    with pytest.raises(DataError, match=r'(?s)not finite.*"pixel_values": 2 values'):
        opened(stored(tmp_path / "x.safetensors", pixel_values=pixels), batch_size=4)


def test_values_beyond_the_first_so_many_do_not_count(tmp_path, pixels):
    pixels[9] = float("nan")

    assert len(opened(stored(tmp_path / "x.safetensors", pixel_values=pixels), examples=9)) == 9


def test_test_data_needs_labels(tmp_path, pixels):
    path = stored(tmp_path / "x.safetensors", pixel_values=pixels)

    with pytest.raises(DataError, match='test data has no "labels"'):
        opened(path, purpose="test")


@pytest.mark.parametrize("labels", [torch.zeros(10), torch.zeros(10, 2, dtype=torch.long)])
def test_labels_must_be_class_indices(tmp_path, pixels, labels):
    path = stored(tmp_path / "x.safetensors", pixel_values=pixels, labels=labels)

    with pytest.raises(DataError, match="one class index per example"):
        opened(path, purpose="test")


def test_large_examples_go_fewer_at_a_time_unless_the_spec_says_how_many(tmp_path):
    small = stored(tmp_path / "small.safetensors", pixel_values=torch.rand(40, 3, 8, 8))
    large = stored(tmp_path / "large.safetensors", pixel_values=torch.rand(40, 3, 224, 224))

    assert [len(batch["pixel_values"]) for batch in opened(small).batches()] == [32, 8]
    assert [len(batch["pixel_values"]) for batch in opened(large).batches()] == [16, 16, 8]
    assert [len(batch["pixel_values"]) for batch in opened(large, batch_size=40).batches()] == [40]
