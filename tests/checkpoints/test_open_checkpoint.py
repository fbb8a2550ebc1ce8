"""open_checkpoint: the right reader, or a refusal that says what the thing is."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from merging.checkpoints.folder import config, open_checkpoint, side_files
from merging.checkpoints.safetensors import SafetensorsSource
from merging.checkpoints.torch_bin import TorchBinSource
from merging.errors import CheckpointError

WEIGHT = "model.layers.0.self_attn.q_proj.weight"


@pytest.fixture
def llama(tiny, tmp_path):
    tiny("llama").save_pretrained(tmp_path / "llama")
    return tmp_path / "llama"


def with_config(folder, **values):
    (folder / "config.json").write_text(
        json.dumps({**json.loads((folder / "config.json").read_text()), **values})
    )


def test_safetensors_come_before_pickles(llama):
    torch.save({"other": torch.zeros(1)}, llama / "pytorch_model.bin")
    source = open_checkpoint(llama, "base")
    assert isinstance(source, SafetensorsSource)
    assert source.label == "base"
    assert "ignored: pytorch_model.bin" in source.notes[0]


def test_pickles_are_read_where_there_is_nothing_else(llama):
    tensors = load_file(llama / "model.safetensors")
    (llama / "model.safetensors").unlink()
    torch.save(tensors, llama / "pytorch_model.bin")
    source = open_checkpoint(llama)
    assert isinstance(source, TorchBinSource)
    assert all(torch.equal(source.read(name), tensor) for name, tensor in tensors.items())


def test_the_config_is_that_of_the_folder_or_beside_the_file(llama):
    assert config(llama)["model_type"] == "llama"
    assert config(llama / "model.safetensors") == config(llama)
    assert config(llama.parent) is None


def test_a_damaged_config_is_named(llama):
    (llama / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config\.json is not valid JSON"):
        open_checkpoint(llama)


def test_a_missing_folder_is_answered_with_the_nearest_one(llama):
    with pytest.raises(CheckpointError, match=r'(?s)lama does not exist.*Did you mean ".*llama"'):
        open_checkpoint(llama.parent / "lama")


def test_packed_weights_are_refused_by_format_and_tensor(llama):
    tensors = load_file(llama / "model.safetensors")
    tensors[WEIGHT] = tensors[WEIGHT].to(torch.uint8)
    save_file(tensors, llama / "model.safetensors", metadata={"format": "pt"})
    with_config(llama, quantization_config={"quant_method": "bitsandbytes", "load_in_4bit": True})
    with pytest.raises(
        CheckpointError, match=rf'quantised \(bitsandbytes, 4 bits\): "{WEIGHT}" is stored as uint8'
    ):
        open_checkpoint(llama, 'expert "mnist"')


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int32, torch.float8_e4m3fn])
def test_packed_weights_are_known_without_a_config_too(llama, dtype):
    tensors = load_file(llama / "model.safetensors")
    tensors[WEIGHT] = tensors[WEIGHT].to(dtype)
    save_file(tensors, llama / "model.safetensors")
    (llama / "config.json").unlink()
    with pytest.raises(CheckpointError, match="is quantised"):
        open_checkpoint(llama)


def test_a_config_that_says_quantised_over_plain_weights_is_noted(llama):
    with_config(llama, quantization_config={"quant_method": "bitsandbytes", "load_in_8bit": True})
    assert (
        "its config says quantised (bitsandbytes, 8 bits), its weights are not"
        in open_checkpoint(llama).notes[0]
    )


def test_counters_positions_and_masks_are_not_quantised(tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
    tensors = {**model.state_dict(), "position_ids": torch.arange(4), "mask": torch.ones(3, dtype=torch.bool)}
    save_file(tensors, tmp_path / "model.safetensors")
    source = open_checkpoint(tmp_path)
    assert source.spec("1.num_batches_tracked").dtype == torch.int64
    assert source.spec("mask").dtype == torch.bool


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("model-q4.gguf", "GGUF"),
        ("tf_model.h5", "TensorFlow"),
        ("flax_model.msgpack", "Flax"),
        ("model.onnx", "ONNX"),
    ],
)
def test_other_formats_are_refused_by_name(tmp_path, name, words):
    (tmp_path / name).write_bytes(b"whatever")
    for path in (tmp_path, tmp_path / name):
        with pytest.raises(CheckpointError, match=words):
            open_checkpoint(path)


def test_an_adapter_is_not_a_checkpoint(tmp_path):
    save_file({"a": torch.zeros(1)}, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r'(?s)is an adapter.*under "adapter"'):
        open_checkpoint(tmp_path)


def test_an_empty_folder_and_an_empty_file_of_tensors(tmp_path):
    with pytest.raises(CheckpointError, match="holds no weights"):
        open_checkpoint(tmp_path)
    save_file({}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="holds no tensors"):
        open_checkpoint(tmp_path)


def test_what_a_dead_run_left_is_not_a_checkpoint(llama):
    hidden = llama.parent / ".merged.partial-01234567"
    hidden.mkdir()
    llama.rename(hidden / "content")
    with pytest.raises(CheckpointError, match="not a finished checkpoint"):
        open_checkpoint(hidden / "content")


def test_known_side_files_are_listed_and_unknown_ones_too(llama):
    known = [
        "config.json",
        "generation_config.json",
        "chat_template.jinja",
        "preprocessor_config.json",
        "special_tokens_map.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "added_tokens.json",
        "vocab.json",
        "merges.txt",
        "spiece.model",
        "modules.json",
        "sentence_bert_config.json",
        "1_Pooling/config.json",
        "2_Dense/model.safetensors",
        "additional_chat_templates/tools.jinja",
        "open_clip_config.json",
        "LICENSE",
    ]
    unknown = ["foo.json", "modeling_mine.py", "trainer_state.json", "training_args.bin", "onnx/model.onnx"]
    passed_over = ["README.md", ".gitattributes", ".cache/huggingface/x.metadata", "manifest.json"]
    for name in [*known[1:], *unknown, *passed_over]:
        (llama / name).parent.mkdir(parents=True, exist_ok=True)
        (llama / name).write_text("{}")
    found = side_files(llama)
    assert set(found.known) == set(known)
    assert set(found.unknown) == set(unknown)


@pytest.mark.parametrize("names", [3, "Dinov2Model", {"0": "Dinov2Model"}, [["Dinov2Model"]]])
def test_model_classes_that_are_no_list_of_names_are_refused(tmp_path, names):
    (tmp_path / "config.json").write_text(json.dumps({"architectures": names}))

    with pytest.raises(CheckpointError, match=r'config.json: "architectures" is .*, expected a list'):
        config(tmp_path)


@pytest.mark.parametrize("names", [None, [], ["Dinov2Model"]])
def test_a_config_may_name_no_model_class(tmp_path, names):
    (tmp_path / "config.json").write_text(json.dumps({"architectures": names}))

    assert config(tmp_path) == {"architectures": names}
