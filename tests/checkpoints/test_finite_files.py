"""Values that are not finite are counted by tensor while a file is hashed, and remembered by its content."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from merging import native
from merging.checkpoints import finite_files, hashing
from merging.checkpoints.finite_files import FiniteFiles, not_finite
from merging.checkpoints.hashing import FileHashes
from merging.errors import CheckpointError

BAD = (float("nan"), float("inf"), float("-inf"))
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64]
NARROW = [torch.float8_e5m2, torch.float8_e4m3fn]


@pytest.fixture(autouse=True)
def nothing_is_fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hashing, "_FRESH", -1e9)


@pytest.fixture(params=["compiled", "plain"])
def _kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "plain":
        monkeypatch.setattr(native, "library", lambda: None)
    elif native.library() is None:
        pytest.skip("installed without a C compiler")


def known(folder: Path) -> FiniteFiles:
    return FiniteFiles(FileHashes(folder / "hashes"), folder / "memory")


def raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


@pytest.mark.usefixtures("_kind")
@pytest.mark.parametrize("dtype", FLOATS + NARROW, ids=str)
@pytest.mark.parametrize("count", [1, 7, 511, 513, 70_000])
def test_the_count_is_torchs_own(dtype: torch.dtype, count: int) -> None:
    generator = torch.Generator().manual_seed(count)
    values = torch.randn(count, generator=generator)
    places = torch.randperm(count, generator=generator)[: count // 3 + 1]
    values[places] = torch.tensor(BAD)[torch.arange(len(places)) % 3]
    tensor = values.to(dtype)

    found = not_finite(raw(tensor), dtype)

    wide = tensor if dtype == torch.complex64 else tensor.double()
    assert found == int((~torch.isfinite(wide)).sum())
    assert found > 0
    assert not_finite(raw(torch.nan_to_num(values, 0.0, 1.0, 1.0).to(dtype)), dtype) == 0


@pytest.mark.usefixtures("_kind")
@pytest.mark.parametrize("dtype", FLOATS[:4], ids=str)
def test_every_pattern_of_ones_is_one_and_the_largest_number_is_none(dtype: torch.dtype) -> None:
    largest = torch.finfo(dtype).max
    assert not_finite(raw(torch.tensor([largest, -largest, 0.0, -0.0], dtype=dtype)), dtype) == 0
    all_of_16_bits = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16)
    if dtype.itemsize == 2:
        everything = all_of_16_bits.view(dtype)
        assert not_finite(raw(everything), dtype) == int((~torch.isfinite(everything)).sum())


def test_integers_are_never_such() -> None:
    assert not_finite(raw(torch.full((9,), -1)), torch.int64) == 0


@pytest.mark.usefixtures("_kind")
def test_tensors_are_named_and_the_hash_is_that_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(finite_files, "_BLOCK", 64)  # so that tensors are read in many pieces
    path = tmp_path / "model.safetensors"
    tensors = {
        "odd": torch.ones(3, dtype=torch.uint8),  # what follows lies at no even place
        "half": torch.randn(1001).bfloat16(),
        "wide": torch.randn(333),
        "single": torch.tensor(float("inf")),
        "empty": torch.empty(0, 4),
    }
    tensors["half"][[0, 500, 1000]] = torch.tensor(BAD).bfloat16()
    tensors["wide"][332] = float("nan")
    save_file(tensors, path, {"format": "pt"})
    hashes = FileHashes(tmp_path / "hashes")

    found = FiniteFiles(hashes, tmp_path / "memory").of(path)

    assert found == {"half": 3, "wide": 1, "single": 1}
    assert hashes.recalled(path) == hashlib.sha256(path.read_bytes()).hexdigest()


def test_a_known_file_is_not_read_again_by_the_next_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"x": torch.tensor([1.0, float("nan")])}, path)
    hashes = FileHashes(tmp_path / "hashes")
    first = FiniteFiles(hashes, tmp_path / "memory")
    assert first.recalled(path) is None
    first.of(path)
    first.save()
    hashes.save()
    monkeypatch.setattr(finite_files, "_hashed_and_counted", lambda file: pytest.fail("it is read again"))

    assert known(tmp_path).recalled(path) == {"x": 1}
    assert known(tmp_path).of(path) == {"x": 1}


def test_a_file_of_which_only_the_hash_is_known_is_read(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"x": torch.tensor([1.0, float("nan")])}, path)
    hashes = FileHashes(tmp_path / "hashes")
    hashes.of(path)

    assert FiniteFiles(hashes, tmp_path / "memory").of(path) == {"x": 1}


def test_a_changed_file_is_read_again(tmp_path: Path) -> None:
    path, found = tmp_path / "model.safetensors", known(tmp_path)
    save_file({"x": torch.tensor([1.0, float("nan")])}, path)
    assert found.of(path) == {"x": 1}
    save_file({"x": torch.tensor([1.0, 2.0])}, path)
    assert found.of(path) == {}


def test_pickled_weights_are_counted_too(tmp_path: Path) -> None:
    path = tmp_path / "pytorch_model.bin"
    matrix = torch.randn(6, 4)
    matrix[2, 3] = float("nan")
    torch.save({"x": matrix.T, "y": torch.ones(2), "n": torch.tensor(3)}, path)

    assert known(tmp_path).of(path) == {"x": 1}


def test_no_checkpoint_is_an_error_that_names_it(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"x" * 100)
    with pytest.raises(CheckpointError, match=r"model\.safetensors is damaged"):
        known(tmp_path).of(path)


@pytest.mark.parametrize("spoil", [b"", b"[1]", b'{"a": 1}', b'{"a": {"b": -1}}', b"[" * 100_000, b"\xff"])
def test_a_spoilt_memory_is_forgotten(tmp_path: Path, spoil: bytes) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"x": torch.tensor([1.0, float("nan")])}, path)
    (tmp_path / "memory").write_bytes(spoil)
    found = known(tmp_path)

    assert found.of(path) == {"x": 1}
    found.save()
    assert {"x": 1} in json.loads((tmp_path / "memory").read_text()).values()


def test_a_memory_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"x": torch.ones(2)}, path)
    (tmp_path / "file").write_bytes(b"")
    found = FiniteFiles(FileHashes(tmp_path / "hashes"), tmp_path / "file" / "memory")
    found.of(path)
    found.save()
