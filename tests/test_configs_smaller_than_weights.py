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
    backbone: Any = "auto",
    **config: Any,
) -> tuple[str, ...]:
    """What is remarked of a base and an expert that are that model; raises what a run would."""
    torch.manual_seed(0)
    base = saved(folder / "base", model, config=config, tensors=tensors or {})
    expert = saved(folder / "expert", model, config=config, tensors=tensors or {})
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


def test_biases_of_zeros_that_a_config_switches_off_are_only_remarked(tmp_path: Path) -> None:
    zeros = {"model.layers.0.self_attn.q_proj.bias": torch.zeros(32)}

    notes = checked(tmp_path, hf.LlamaForCausalLM(hf.LlamaConfig(**GROUPED)), tensors=zeros)

    assert any("1 stored tensors lie among the modules" in note and "q_proj.bias" in note for note in notes)


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
