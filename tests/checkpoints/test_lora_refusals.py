"""Adapters that do not fit their base or are more than LoRA: what stops, and what it is told by."""

from __future__ import annotations

import copy
import json
import warnings

import peft
import pytest
import torch
from peft_adapters import adapted
from safetensors.torch import load_file, save_file

from merging.checkpoints.alignment import align
from merging.checkpoints.folder import open_checkpoint
from merging.checkpoints.lora import open_adapter
from merging.checkpoints.safetensors import SafetensorsSource
from merging.checkpoints.source import StateDictSource
from merging.errors import CheckpointError


@pytest.fixture
def llama(tiny, tmp_path):
    """Model, its stored base and the folder of an adapter on q_proj: four tensors."""
    model = tiny("llama")
    model.save_pretrained(tmp_path / "base")
    adapted(model, tmp_path / "adapter", target_modules=["q_proj"])
    return model, SafetensorsSource(tmp_path / "base"), tmp_path / "adapter"


def renamed(folder, change):
    file = folder / "adapter_model.safetensors"
    save_file({change(name): tensor for name, tensor in load_file(file).items()}, file)


def configured(folder, **fields):
    file = folder / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


def test_an_adapter_that_matches_nothing_stops_with_an_example_of_each_side(llama):
    model, base, folder = llama
    renamed(folder, lambda name: name.replace("model.layers", "model.language_model.layers"))

    with pytest.raises(CheckpointError) as caught:
        open_adapter(folder, base, model, 'expert "math"')

    text = str(caught.value)
    assert 'expert "math": 0 of 4 adapter tensors match the base' in text
    assert "model.language_model.layers.0.self_attn.q_proj.weight" in text
    assert "the base has: model.layers.0.self_attn.q_proj.weight" in text


def test_an_adapter_that_matches_in_half_stops_too(llama):
    model, base, folder = llama
    renamed(folder, lambda name: name.replace("layers.1.self_attn", "layers.1.attention"))

    with pytest.raises(
        CheckpointError, match=r"2 of 4 adapter tensors match[\s\S]*layers\.1\.attention\.q_proj"
    ):
        open_adapter(folder, base, model)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"target_parameters": ["mlp.down_proj.weight"]}, "target_parameters"),
        ({"trainable_token_indices": [1, 2]}, "trainable_token_indices"),
        ({"layer_replication": [[0, 2], [1, 2]]}, "layer_replication"),
        ({"alora_invocation_tokens": [5]}, "alora_invocation_tokens"),
        ({"use_qalora": True}, "use_qalora"),
        ({"init_lora_weights": "pissa"}, '"pissa" takes a part of the base'),
        ({"init_lora_weights": "loftq", "loftq_config": {"loftq_bits": 4}}, "loftq_config"),
        ({"use_something_new": True}, "use_something_new: is a field that this version does not know"),
        ({"peft_type": "IA3"}, 'is a IA3 adapter \\("peft_type"'),
    ],
)
def test_what_is_more_than_lora_is_refused_by_field_with_the_way_out(llama, fields, words):
    model, base, folder = llama
    configured(folder, **fields)

    with pytest.raises(CheckpointError, match=rf"{words}[\s\S]*merge_and_unload"):
        open_adapter(folder, base, model)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"r": "many"}, "is damaged"),
        ({"r": 0}, "is damaged"),
        ({"r": 8}, "lora_A has 4 rows, its config says rank 8"),
        ({"rank_pattern": {"q_(": 4}}, "pattern cannot be read"),
        ({"use_dora": True}, "lora_magnitude_vector is missing"),
    ],
)
def test_a_config_that_does_not_belong_to_the_tensors_is_refused(llama, fields, words):
    model, base, folder = llama
    configured(folder, **fields)

    with pytest.raises(CheckpointError, match=words):
        open_adapter(folder, base, model)


def test_factors_without_their_counterpart_are_refused(llama):
    model, base, folder = llama
    file = folder / "adapter_model.safetensors"
    save_file(
        {name: tensor for name, tensor in load_file(file).items() if "0.self_attn.q_proj.lora_B" not in name},
        file,
    )

    with pytest.raises(
        CheckpointError, match=r"model\.layers\.0\.self_attn\.q_proj: has lora_A and no lora_B"
    ):
        open_adapter(folder, base, model)


def test_an_adapter_of_another_width_is_refused_with_both_shapes(tiny, llama, tmp_path):
    _, _, folder = llama
    wide = tiny("llama", hidden_size=64)
    wide.save_pretrained(tmp_path / "wide")

    with pytest.raises(
        CheckpointError, match=r"its change is 32 x 32, the base's .*q_proj\.weight is 64 x 64"
    ):
        open_adapter(folder, SafetensorsSource(tmp_path / "wide"), wide)


def test_a_quantised_adapter_is_refused(llama):
    model, base, folder = llama
    file = folder / "adapter_model.safetensors"
    save_file({name: tensor.to(torch.int8) for name, tensor in load_file(file).items()}, file)

    with pytest.raises(CheckpointError, match="quantised"):
        open_adapter(folder, base, model)


@pytest.mark.parametrize(
    ("missing", "words"),
    [
        ("adapter_config.json", "it has no adapter_config.json"),
        ("adapter_model.safetensors", "holds no adapter's weights"),
    ],
)
def test_a_folder_that_lacks_a_part_of_the_adapter_is_refused(llama, missing, words):
    model, base, folder = llama
    (folder / missing).unlink()

    with pytest.raises(CheckpointError, match=words):
        open_adapter(folder, base, model)


def test_a_full_checkpoint_given_as_adapter_and_the_reverse_are_told_apart(llama, tmp_path):
    model, base, folder = llama

    with pytest.raises(CheckpointError, match='name it under "model"'):
        open_adapter(tmp_path / "base", base, model)
    with pytest.raises(CheckpointError, match='"adapter" instead of "model"'):
        open_checkpoint(folder)


def test_an_adapter_trained_on_another_base_gives_a_note_with_both_names(llama, tmp_path):
    model, base, folder = llama

    def notes(trained_on, name="org/llama", place=None):
        configured(folder, base_model_name_or_path=trained_on)
        return open_adapter(folder, base, model, "expert", base_name=name, base_folder=place).notes

    assert any('"org/other"' in note and '"org/llama"' in note for note in notes("org/other"))
    assert notes(str(tmp_path / "adapter"), str(tmp_path / "base"), tmp_path / "base")
    assert not notes("org/llama")
    assert not notes(None)
    assert not notes("org/llama", "models/llama")  # a copy of it
    assert not notes(str(tmp_path / "base" / "." / "."), "base", tmp_path / "base")


def test_a_tied_head_that_an_adapter_changes_alone_is_refused(tiny, tmp_path):
    model = tiny("llama_tied")
    model.save_pretrained(tmp_path / "base")
    adapted(model, tmp_path / "adapter", target_modules=["q_proj", "lm_head"])

    with pytest.raises(
        CheckpointError, match=r'adapts "lm_head", which the base ties to "model\.embed_tokens'
    ):
        open_adapter(tmp_path / "adapter", SafetensorsSource(tmp_path / "base"), model)


def test_embedding_and_head_that_an_adapter_trained_apart_are_not_tied_again(tiny, tmp_path):
    model = tiny("llama_tied")
    model.save_pretrained(tmp_path / "base")
    base = SafetensorsSource(tmp_path / "base")
    adapted(
        model, tmp_path / "adapter", target_modules=["q_proj"], modules_to_save=["embed_tokens", "lm_head"]
    )

    source = open_adapter(tmp_path / "adapter", base, model, "expert")
    fit = align(base, source, model, lambda name: False, tied=True)

    assert len(fit.problems) == 1
    assert "lm_head.weight" in fit.problems[0].where
    assert "to which the base ties it" in fit.problems[0].what
    assert "does not tie the two" in fit.problems[0].remedy


def test_an_embedding_that_an_adapter_trained_without_its_tied_head_is_refused(tiny, tmp_path):
    model = tiny("llama_tied")
    model.save_pretrained(tmp_path / "base")
    adapted(model, tmp_path / "adapter", target_modules=["q_proj"], modules_to_save=["embed_tokens"])

    with pytest.raises(
        CheckpointError, match=r'replaces "model\.embed_tokens\.weight" alone.*"lm_head\.weight"'
    ):
        open_adapter(tmp_path / "adapter", SafetensorsSource(tmp_path / "base"), model)


def test_embedding_and_head_that_stayed_tied_are_one_tensor(tiny, tmp_path):
    model = tiny("llama_tied")
    model.save_pretrained(tmp_path / "base")
    base = SafetensorsSource(tmp_path / "base")
    tied = {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True}
    merged = adapted(model, tmp_path / "adapter", target_modules=["q_proj"], **tied)

    source = open_adapter(tmp_path / "adapter", base, model, "expert")
    fit = align(base, source, model, lambda name: False, tied=True)

    assert not fit.problems
    assert set(fit.source.names()) == set(base.names())
    assert torch.equal(fit.source.read("model.embed_tokens.weight"), merged["lm_head.weight"])


def test_an_adapter_with_a_larger_vocabulary_is_refused_as_that(tiny, tmp_path):
    model = tiny("llama")
    model.save_pretrained(tmp_path / "base")
    base = SafetensorsSource(tmp_path / "base")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        larger = copy.deepcopy(model)
        larger.resize_token_embeddings(66)
    adapted(
        larger, tmp_path / "adapter", target_modules=["q_proj"], modules_to_save=["embed_tokens", "lm_head"]
    )

    source = open_adapter(tmp_path / "adapter", base, model, "expert")
    fit = align(base, source, model, lambda name: False)

    assert "base 64 x 32, expert 66 x 32" in fit.problems[0].what
    assert "vocabularies differ in size" in fit.problems[0].remedy


class Attention(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.attn = torch.nn.MultiheadAttention(16, 4, batch_first=True)

    def forward(self, x_BTD):
        return self.attn(x_BTD, x_BTD, x_BTD, need_weights=False)[0]


def test_fused_attention_reads_as_peft_runs_and_merges_it(tmp_path):
    torch.manual_seed(0)
    model = Attention().eval()
    base = StateDictSource(copy.deepcopy(model.state_dict()))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = peft.LoraConfig(r=3, lora_alpha=6, init_lora_weights=False, target_modules=["attn"])
        wrapped = peft.get_peft_model(copy.deepcopy(model), config).eval()
        wrapped.save_pretrained(tmp_path)
        x_BTD = torch.randn(2, 5, 16)
        wanted_BTD = wrapped(x_BTD)
        merged = wrapped.merge_and_unload().state_dict()

    source = open_adapter(tmp_path, base, None)

    tensors = {name: source.read(name).float() for name in source.names()}
    assert all(torch.allclose(tensors[name], merged[name], atol=1e-6) for name in merged)
    model.load_state_dict(tensors)
    assert torch.allclose(model(x_BTD), wanted_BTD, atol=1e-5)
    assert any("counts twice" in note for note in source.notes)
