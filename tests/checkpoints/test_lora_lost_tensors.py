"""Adapters whose files lack what their config speaks of, and configs that speak in vain."""

from __future__ import annotations

import json

import pytest
from peft_adapters import adapted
from safetensors.torch import load_file, save_file

from merging.checkpoints.lora import open_adapter
from merging.checkpoints.safetensors import SafetensorsSource
from merging.errors import CheckpointError

CLOSED = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.fixture
def adapter(tiny, tmp_path):
    """Makes an adapter by PEFT, and gives what opens it."""
    model = tiny("llama")
    model.save_pretrained(tmp_path / "base")

    def make(*, lose: str = "\0", fields: dict | None = None, **config):
        adapted(model, tmp_path / "adapter", **{"target_modules": ["q_proj", "v_proj"], **config})
        file, said = (
            tmp_path / "adapter" / name for name in ("adapter_model.safetensors", "adapter_config.json")
        )
        save_file({name: tensor for name, tensor in load_file(file).items() if lose not in name}, file)
        said.write_text(json.dumps({**json.loads(said.read_text()), **(fields or {})}))
        return lambda skeleton=model: open_adapter(
            tmp_path / "adapter", SafetensorsSource(tmp_path / "base"), skeleton, "it"
        )

    return make


@pytest.mark.parametrize(
    ("lose", "targets"),
    [
        ("layers.0.self_attn.q_proj", ["q_proj", "v_proj"]),
        ("q_proj", ["q_proj", "v_proj"]),
        ("layers.0.", ["q_proj", "v_proj"]),
        ("layers.0.", r".*\.(q|v)_proj"),
    ],
)
@pytest.mark.parametrize("with_model", [True, False])
def test_a_layer_without_its_factors_stops_with_the_key_and_the_tensor(adapter, lose, targets, with_model):
    opened = adapter(lose=lose, target_modules=targets)

    with pytest.raises(CheckpointError) as caught:
        opened() if with_model else opened(None)

    assert "it: target_modules" in str(caught.value)
    assert f"{CLOSED}.lora_A.weight" in str(caught.value)


@pytest.mark.parametrize(
    "config",
    [
        {"layers_to_transform": [1]},
        {"layers_to_transform": 1, "layers_pattern": "layers"},
        {"exclude_modules": ["layers.0.self_attn.q_proj"]},
        {"exclude_modules": r".*layers\.0\..*"},
        {"target_modules": r".*layers\.1\..*(q|v)_proj"},
        {"target_modules": "all-linear"},
        {"target_modules": ["model.layers.1.self_attn.q_proj"]},
        {"target_modules": ["q_proj", "lm_head", "no_such"]},
        {"modules_to_save": ["lm_head"]},
        {"modules_to_save": ["classifier", "lm_head"]},
        {"modules_to_save": ["q_proj"], "target_modules": ["q_proj", "v_proj"]},
        {"use_dora": True},
    ],
)
def test_what_peft_leaves_out_by_its_config_is_not_missed(adapter, config):
    opened = adapter(**config)

    assert opened().notes == opened(None).notes == ()


def test_a_module_to_save_that_is_not_in_the_file_stops(adapter):
    opened = adapter(fields={"modules_to_save": ["lm_head"]})

    with pytest.raises(CheckpointError, match=r'modules_to_save[\s\S]*"base_model\.model\.lm_head\.weight"'):
        opened()


def test_lengths_of_dora_without_use_dora_stop(adapter):
    opened = adapter(use_dora=True, fields={"use_dora": False})

    with pytest.raises(CheckpointError, match=r"use_dora is not set[\s\S]*q_proj\.lora_magnitude_vector"):
        opened()


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"exclude_modules": ["v_proj"], "layers_to_transform": [0]}, ("exclude_modules is", "layers_to")),
    ],
)
def test_each_module_that_peft_would_leave_out_is_told_once(adapter, fields, words):
    notes = adapter(fields=fields)().notes

    assert [word in note for note, word in zip(notes, words, strict=True)] == [True, True]
    assert "2 modules" in notes[0]
    assert "1 module that" in notes[1]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"lora_bias": True}, "lora_bias is set, and 4 of 4 modules have no lora_B.bias"),
        ({"alpha_pattern": {"q_porj": 9}}, 'patterns in alpha_pattern decide for no .*"q_porj"'),
        ({"rank_pattern": {"layers.7.*": 9}}, 'patterns in rank_pattern decide for no .*"layers.7'),
        ({"layers_to_transform": [0]}, r"layers_to_transform is \[0\].* 2 modules .*layers\.1\.[\s\S]*PEFT"),
        ({"exclude_modules": ["v_proj"]}, r"exclude_modules is .* 2 modules .*v_proj[\s\S]*PEFT"),
        ({"exclude_modules": r".*layers\.0\..*"}, r"exclude_modules is .* 2 modules .*layers\.0\."),
        ({"target_modules": ["q_proj"]}, r"target_modules is .* 2 modules .*v_proj"),
        ({"target_modules": r".*\.1\..*(q|v)_proj"}, r"target_modules is .* 2 modules .*layers\.0\."),
    ],
)
def test_what_the_config_says_in_vain_is_noted(adapter, fields, words):
    import re

    (note,) = adapter(fields=fields)().notes

    assert re.search(words, note)


def test_layers_that_the_model_does_not_load_are_not_missed(adapter, tmp_path):
    opened = adapter()
    file = tmp_path / "base" / "model.safetensors"
    stored = load_file(file)
    more = stored["model.layers.1.self_attn.q_proj.weight"].clone()
    save_file({**stored, "model.layers.2.self_attn.q_proj.weight": more}, file)

    assert opened().notes == ()
