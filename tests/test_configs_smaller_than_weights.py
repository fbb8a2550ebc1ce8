"""Configs that make less than the weights have, or another class; and what lies beside a model by right."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from routed_models import routed_model
from safetensors.torch import load_file, save_file
from tiny_models import CASES, GROUPED, PICTURE, SIZE, TEXT
from torch import Tensor, nn

from merging.errors import CheckpointError
from merging.pipeline import Pipeline


def vit() -> nn.Module:
    model = hf.ViTForImageClassification(hf.ViTConfig(**SIZE, **PICTURE, num_labels=2))
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):  # which are zeros at first
            nn.init.constant_(parameter, 0.1)
    return model


def t5() -> nn.Module:
    return hf.T5ForConditionalGeneration(
        hf.T5Config(d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, **TEXT)
    )


def clip() -> nn.Module:
    return hf.CLIPModel(
        hf.CLIPConfig(vision_config={**SIZE, **PICTURE}, text_config={**SIZE, **TEXT}, projection_dim=16)
    )


def swin() -> nn.Module:
    return hf.SwinModel(
        hf.SwinConfig(
            image_size=32, patch_size=2, embed_dim=16, depths=[2, 2], num_heads=[2, 2], window_size=4
        )
    )


def routed() -> nn.Module:
    return routed_model("qwen3_moe")[1]


def saved(
    folder: Path, model: nn.Module, *, config: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> Path:
    """The model's folder, its config changed and tensors added."""
    model.save_pretrained(folder)
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **config}))
    if tensors:
        weights = folder / "model.safetensors"
        save_file({**load_file(weights), **tensors}, weights, {"format": "pt"})
    return folder


def checked(
    folder: Path,
    model: nn.Module,
    *,
    tensors: Mapping[str, Tensor] | None = None,
    without: str = "",
    backbone: Any = "auto",
    **config: Any,
) -> tuple[str, ...]:
    """What is remarked of a base and an expert that are that model, less the tensors `without`; raises what a
    run would."""
    torch.manual_seed(0)
    base = saved(folder / "base", model, config=config, tensors=tensors or {})
    expert = saved(folder / "expert", model, config=config, tensors=tensors or {})
    for weights in (base / "model.safetensors", expert / "model.safetensors") if without else ():
        stored = load_file(weights)
        kept = {name: tensor for name, tensor in stored.items() if not re.search(without, name)}
        assert len(kept) < len(stored)
        save_file(kept, weights, {"format": "pt"})
    spec = {
        "base": str(base),
        "experts": {"x": str(expert)},
        "merge": {"type": "average"},
        "backbone": backbone,
        "allow": ["same_weights", "config"],
        "device": "cpu",
    }
    return tuple(Pipeline.from_spec(spec).resolve().notes)


@pytest.mark.parametrize(
    ("make", "config", "words"),
    [
        (vit, {"num_hidden_layers": 1}, r"modules that ViTModel does not make .*layer\.?s?\.1\."),
        (vit, {"qkv_bias": False}, r"(query|q_proj)\.bias"),
        (t5, {"num_layers": 1}, r"encoder\.block\.1\."),
        (t5, {"num_decoder_layers": 1}, r"decoder\.block\.1\."),
        (swin, {"depths": [2, 1]}, r"layers\.1\.blocks\.1\."),
        (routed, {"num_local_experts": 3}, r"experts\.3\."),
        (routed, {"num_hidden_layers": 1}, r"layers\.1\."),
    ],
)
def test_a_config_that_makes_less_than_the_weights_have_is_refused(
    tmp_path: Path, make: Callable[[], nn.Module], config: dict[str, Any], words: str
) -> None:
    with pytest.raises(CheckpointError) as refused:
        checked(tmp_path, make(), **config)

    said = " ".join(f"{one.what} {one.remedy}" for one in refused.value.problems)
    assert "Config and weights do not belong together" in said
    assert re.search(words, said), said


def llama() -> nn.Module:
    return hf.LlamaForCausalLM(hf.LlamaConfig(**GROUPED))


@pytest.mark.parametrize(
    ("make", "without", "config", "words"),
    [
        (llama, "", {"num_hidden_layers": 5}, r"18 of 48 parameters .*layers\.3\."),
        (llama, r"layers\.1\.", {}, r"9 of 30 .*layers\.1\."),
        (llama, r"layers\.0\.self_attn\.q_proj", {}, r"1 of 30 .*q_proj\.weight"),
        (llama, "embed_tokens", {}, r"1 of 30 .*embed_tokens"),
        (llama, "lm_head", {"tie_word_embeddings": False}, r"1 of 30 .*lm_head"),
        (llama, "", {"attention_bias": True}, r"12 of 42 .*q_proj\.bias"),
        (vit, r"layer\.?s?\.1\.", {}, r"layers?\.1\."),
        (t5, r"decoder\.block\.1\.", {}, r"decoder\.block\.1\."),
        (routed, r"experts\.3\.", {}, r"experts\.3\."),
    ],
)
def test_weights_that_are_less_than_the_config_makes_are_refused(
    tmp_path: Path, make: Callable[[], nn.Module], without: str, config: dict[str, Any], words: str
) -> None:
    with pytest.raises(CheckpointError) as refused:
        checked(tmp_path, make(), without=without, **config)

    said = " ".join(f"{one.what} {one.remedy}" for one in refused.value.problems)
    assert "would be drawn at random" in said
    assert "Config and weights do not belong together" in said
    assert re.search(words, said), said


def swiglu() -> nn.Module:
    return hf.Dinov2Model(hf.Dinov2Config(**SIZE, **PICTURE, use_swiglu_ffn=True))


@pytest.mark.parametrize(
    ("make", "without"), [(vit, "classifier"), (lambda: CASES["gpt2"][1](), ""), (t5, ""), (swiglu, "")]
)
def test_a_head_of_a_task_and_what_is_tied_or_stored_in_parts_is_not_missed(
    tmp_path: Path, make: Callable[[], nn.Module], without: str
) -> None:
    checked(tmp_path, make(), without=without)


@pytest.mark.parametrize("field", ["num_mtp_layers", "num_nextn_predict_layers"])
@pytest.mark.parametrize("value", [[1], "one", {"a": 1}, 1.5, None, -1])
def test_a_count_of_further_layers_that_is_no_number_is_none(tmp_path: Path, field: str, value: Any) -> None:
    with pytest.raises(CheckpointError, match=r"layers\.2\."):
        checked(tmp_path, llama(), num_hidden_layers=2, **{field: value})


def test_biases_of_zeros_that_a_config_switches_off_are_only_remarked(tmp_path: Path) -> None:
    zeros = {"model.layers.0.self_attn.q_proj.bias": torch.zeros(32)}

    notes = checked(tmp_path, hf.LlamaForCausalLM(hf.LlamaConfig(**GROUPED)), tensors=zeros)

    assert any("1 stored tensors lie among the modules" in note and "q_proj.bias" in note for note in notes)


def test_biases_that_are_zeros_no_more_are_refused_though_their_kind_was_opened_before(
    tmp_path: Path,
) -> None:
    name = "model.layers.0.self_attn.q_proj.bias"
    checked(tmp_path, llama(), tensors={name: torch.zeros(32)})

    with pytest.raises(CheckpointError, match="q_proj"):
        checked(tmp_path, llama(), tensors={name: torch.ones(32)})


def test_a_norm_that_the_class_does_not_have_is_remarked(tmp_path: Path) -> None:
    norm = {"model.layers.0.self_attn.q_norm.weight": torch.ones(8)}

    notes = checked(tmp_path, hf.LlamaForCausalLM(hf.LlamaConfig(**GROUPED)), tensors=norm)

    assert any("q_norm.weight" in note and "never run" in note for note in notes)


@pytest.mark.parametrize("case", [*CASES, "clip_whole", "swin", "routed"])
def test_no_model_of_its_own_config_is_refused_or_remarked(tmp_path: Path, case: str) -> None:
    made = {"clip_whole": clip, "swin": swin, "routed": routed}
    model = made[case]() if case in made else CASES[case][1]()

    notes = checked(tmp_path, model)

    assert not [note for note in notes if "stored tensors" in note]


@pytest.mark.parametrize(
    ("make", "config", "tensors"),
    [
        (t5, {"architectures": ["T5EncoderModel"]}, {}),
        (clip, {"architectures": ["CLIPVisionModel"]}, {}),
        (vit, {}, {"vit.pooler.dense.bias": (32,), "decoder.0.weight": (4, 32)}),
        ("gpt2", {}, {"transformer.h.0.attn.bias": (1, 1, 8, 8), "transformer.h.0.attn.masked_bias": ()}),
        ("llama", {}, {"model.layers.0.self_attn.rotary_emb.inv_freq": (4,)}),
        ("llama", {}, {"mtp.layers.0.weight": (4, 4), "value_head.weight": (1, 32)}),
        ("bert", {}, {"embeddings.position_ids": (1, 512), "cls.predictions.bias": (64,)}),
        ("llama", {}, {"model.layers.0.mlp.up_proj.weight_scale": (1,)}),
    ],
)
def test_what_lies_beside_a_model_by_right_is_passed_over(
    tmp_path: Path, make: Any, config: dict[str, Any], tensors: dict[str, tuple[int, ...]]
) -> None:
    model = CASES[make][1]() if isinstance(make, str) else make()
    more = {name: torch.ones(shape) for name, shape in tensors.items()}

    notes = checked(tmp_path, model, tensors=more, **config)

    assert not [note for note in notes if "stored tensors" in note]


def test_layers_that_predict_further_tokens_are_remarked_and_not_refused(tmp_path: Path) -> None:
    layer = {
        "model.layers.3.eh_proj.weight": torch.ones(32, 64),
        "model.layers.3.enorm.weight": torch.ones(32),
    }

    notes = checked(
        tmp_path,
        hf.LlamaForCausalLM(hf.LlamaConfig(**GROUPED)),
        tensors=layer,
        num_nextn_predict_layers=1,
    )

    assert any("eh_proj.weight" in note for note in notes)


@pytest.mark.parametrize("backbone", ["auto", "vit"])
def test_a_model_type_of_another_class_than_the_config_names_is_refused(
    tmp_path: Path, backbone: str
) -> None:
    with pytest.raises(CheckpointError) as refused:
        checked(tmp_path, vit(), backbone=backbone, model_type="deit")

    said = str(refused.value)
    assert (
        'model_type "deit", which AutoModel loads as DeiTModel, and names ViTForImageClassification' in said
    )


def test_a_model_type_whose_class_holds_the_same_tensors_passes(tmp_path: Path) -> None:
    checked(tmp_path, CASES["roberta"][1](), model_type="xlm-roberta")
