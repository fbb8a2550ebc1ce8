"""Pickled state dicts: tensors in any wrapping are read, anything that could run code is not."""

from __future__ import annotations

import json
import os
import pickle
import zipfile
from pathlib import Path

import pytest
import torch
from torch import nn

from merging.checkpoints.torch_bin import TorchBinSource
from merging.errors import CheckpointError


class Evil:
    """Creates a file when it is unpickled."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return (os.system, (f"touch {self.path}",))


@pytest.fixture
def state(tiny):
    return {name: tensor.clone() for name, tensor in tiny("llama").state_dict().items()}


def assert_same(source, state):
    assert set(source.names()) == set(state)
    for name, tensor in state.items():
        assert torch.equal(source.read(name), tensor)
        assert source.spec(name).shape == tuple(tensor.shape)
        assert not source.read(name).requires_grad


def test_a_plain_state_dict(state, tmp_path):
    torch.save(state, tmp_path / "pytorch_model.bin")
    source = TorchBinSource(tmp_path)
    assert_same(source, state)
    assert torch.equal(
        source.read("model.embed_tokens.weight", slice(3, 9)), state["model.embed_tokens.weight"][3:9]
    )
    assert source.files == (tmp_path / "pytorch_model.bin",)


def test_parameters_give_the_values_of_their_safetensors_twin(state, tmp_path):
    torch.save({name: nn.Parameter(tensor) for name, tensor in state.items()}, tmp_path / "expert.pt")
    assert_same(TorchBinSource(tmp_path / "expert.pt"), state)


def test_views_into_one_storage_give_the_same_values(state, tmp_path):
    whole = torch.cat([tensor.flatten() for tensor in state.values()])
    views, start = {}, 0
    for name, tensor in state.items():
        views[name] = nn.Parameter(whole[start : start + tensor.numel()].view(tensor.shape))
        start += tensor.numel()
    views["transposed"] = whole[:6].view(2, 3).T
    torch.save(views, tmp_path / "pytorch_model.bin")
    source = TorchBinSource(tmp_path)
    assert_same(source, {**state, "transposed": whole[:6].view(2, 3).T})


def test_the_older_format_is_read_too(state, tmp_path):
    torch.save(state, tmp_path / "old.bin", _use_new_zipfile_serialization=False)
    assert_same(TorchBinSource(tmp_path / "old.bin"), state)


def test_shards_are_found_by_their_index(state, tmp_path):
    names = list(state)
    halves = {"pytorch_model-00001-of-00002.bin": names[:9], "pytorch_model-00002-of-00002.bin": names[9:]}
    for file, held in halves.items():
        torch.save({name: state[name] for name in held}, tmp_path / file)
    placement = {name: file for file, held in halves.items() for name in held}
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": placement}))
    source = TorchBinSource(tmp_path)
    assert_same(source, state)
    assert {name: source.shard(name) for name in names} == placement


def test_what_a_training_loop_wraps_around_the_weights_is_noted(state, tmp_path):
    torch.save({"state_dict": state, "epoch": 3, "optimizer": {}}, tmp_path / "last.ckpt")
    source = TorchBinSource(tmp_path / "last.ckpt")
    assert_same(source, state)
    assert 'read from "state_dict"; ignored: epoch, optimizer' in source.notes[0]


def test_entries_that_are_no_tensors_are_noted(state, tmp_path):
    torch.save({**state, "step": 3}, tmp_path / "pytorch_model.bin")
    source = TorchBinSource(tmp_path)
    assert_same(source, state)
    assert "entries that are not tensors are ignored: step" in source.notes[0]


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("place", ["top", "beside", "inside"])
def test_code_is_refused_before_it_can_run(state, tmp_path, zipped, place):
    evil = Evil(tmp_path / "pwned.txt")
    content = {
        "top": evil,
        "beside": {**state, "x": evil},
        "inside": {"state_dict": state, "config": {"a": [evil]}},
    }
    torch.save(content[place], tmp_path / "expert.pt", _use_new_zipfile_serialization=zipped)
    with pytest.raises(CheckpointError, match=r"expert\.pt holds code and not only tensors") as caught:
        TorchBinSource(tmp_path / "expert.pt")
    assert not (tmp_path / "pwned.txt").exists()
    assert "save_model" in str(caught.value)
    assert "weights_only" not in str(caught.value)


def test_a_bare_pickle_is_refused_before_it_can_run(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps(Evil(tmp_path / "pwned.txt")))
    with pytest.raises(CheckpointError, match="holds code and not only tensors"):
        TorchBinSource(tmp_path)
    assert not (tmp_path / "pwned.txt").exists()


@pytest.mark.parametrize("zipped", [True, False])
def test_a_whole_module_is_refused(tmp_path, zipped):
    torch.save(nn.Linear(2, 2), tmp_path / "expert.pt", _use_new_zipfile_serialization=zipped)
    with pytest.raises(CheckpointError, match=r"(?s)holds code and not only tensors.*safetensors"):
        TorchBinSource(tmp_path / "expert.pt")


def test_no_shard_is_loaded_if_another_holds_code(state, tmp_path):
    torch.save(state, tmp_path / "a.bin")
    torch.save({"x": Evil(tmp_path / "pwned.txt")}, tmp_path / "b.bin")
    placement = {**dict.fromkeys(state, "a.bin"), "x": "b.bin"}
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": placement}))
    with pytest.raises(CheckpointError, match=r"b\.bin holds code"):
        TorchBinSource(tmp_path)
    assert not (tmp_path / "pwned.txt").exists()


def test_an_archive_with_a_program_is_refused(tmp_path):
    archive = tmp_path / "clip.pt"
    torch.save({"w": torch.zeros(1)}, archive)
    import zipfile

    with zipfile.ZipFile(archive, "a") as file:
        file.writestr("clip/constants.pkl", b"")
    with pytest.raises(CheckpointError, match="TorchScript program"):
        TorchBinSource(archive)


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("kept", [0.05, 0.5, 0.95])
def test_a_truncated_file_is_damaged(state, tmp_path, zipped, kept):
    path = tmp_path / "pytorch_model.bin"
    torch.save(state, path, _use_new_zipfile_serialization=zipped)
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * kept)])
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin (is damaged|holds code)"):
        TorchBinSource(tmp_path)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is empty"),
        (b"version https://git-lfs.github.com/spec/v1\n", "git-LFS pointer"),
        (b"GGUF\x03", "GGUF"),
        (b"nothing of the kind", "pytorch_model.bin"),
    ],
)
def test_files_that_are_something_else(tmp_path, content, words):
    (tmp_path / "pytorch_model.bin").write_bytes(content)
    with pytest.raises(CheckpointError, match=words):
        TorchBinSource(tmp_path)


@pytest.mark.parametrize("content", [[torch.zeros(1)], torch.zeros(2), 3])
def test_tensors_without_names_are_refused(tmp_path, content):
    torch.save(content, tmp_path / "x.pt")
    with pytest.raises(CheckpointError, match="expected a mapping of names to tensors"):
        TorchBinSource(tmp_path / "x.pt")


def test_sparse_tensors_are_refused(tmp_path):
    torch.save({"w": torch.eye(3).to_sparse()}, tmp_path / "x.pt")
    with pytest.raises(CheckpointError, match='"w" is sparse_coo'):
        TorchBinSource(tmp_path / "x.pt")


def _archived(path: Path, pickled: bytes) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", pickled)


@pytest.mark.parametrize(
    ("pickled", "said"),
    [
        (b"\x80\x04" + b"(" * 2_000_000, "opens more than 1000 containers"),
        (b"\x80\x02" + b"N0" * 600_000 + b"N.", "takes more than 1000000 steps"),
    ],
    ids=["marks", "steps"],
)
@pytest.mark.parametrize("archived", [False, True], ids=["older", "archive"])
def test_a_pickle_without_end_is_damaged_at_once(
    tmp_path: Path, pickled: bytes, said: str, archived: bool
) -> None:
    file = tmp_path / "pytorch_model.bin"
    if archived:
        _archived(file, pickled)
    else:
        file.write_bytes(pickled)

    with pytest.raises(CheckpointError, match=f"{file} is damaged: its pickle {said}"):
        TorchBinSource(tmp_path)


@pytest.mark.parametrize("newer", [False, True])
def test_as_many_tensors_as_models_have_are_read(tmp_path: Path, newer: bool) -> None:
    tensors = {f"layer.{number}.weight": torch.zeros(1) for number in range(1500)}
    torch.save(tensors, tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=newer)

    assert len(TorchBinSource(tmp_path).names()) == 1500


def test_the_steps_that_a_pickle_may_take_follow_the_size_of_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("merging.checkpoints.torch_bin._STEPS", 1000)
    torch.save({f"layer.{number}.weight": torch.zeros(1) for number in range(1500)}, tmp_path / "real.bin")
    (tmp_path / "dense.bin").write_bytes(b"\x80\x02" + b"N0" * 10_000 + b"N.")

    assert len(TorchBinSource(tmp_path / "real.bin").names()) == 1500
    with pytest.raises(CheckpointError, match="takes more than 2500 steps"):
        TorchBinSource(tmp_path / "dense.bin")
    monkeypatch.setattr("merging.checkpoints.torch_bin._MOST", 2000)
    with pytest.raises(CheckpointError, match="takes more than 2000 steps"):
        TorchBinSource(tmp_path / "real.bin")
