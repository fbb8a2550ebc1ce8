"""Adapters are written for the class that the base's config names: PEFT loads them there, all of them.

Of heads, of tensors that are tied, and of experts that the class holds stacked.
"""

from __future__ import annotations

import copy
import json
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers as hf
from peft.utils import transformers_weight_conversion as conversion
from peft_adapters import adapted, loaded
from routed_models import ROUTED
from safetensors.torch import load_file, save_file
from tiny_models import BART, DINOV2, GROUPED, PICTURE, SIZE, TEXT, WHISPER, pixels, sounds
from torch import Tensor, nn

from merging.checkpoints.lora_experts import TAKEN
from merging.checkpoints.lora_roles import outline_of
from merging.checkpoints.safetensors import SafetensorsSource
from merging.errors import CheckpointError, MergingError
from merging.pipeline import Pipeline

IDS = torch.tensor([[5, 9, 30, 4, 7, 8, 2]])
WORDS = {"input_ids": IDS}
PAIR = {"input_ids": IDS, "decoder_input_ids": IDS[:, :4]}
BERT = {**SIZE, "vocab_size": 64}
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, **TEXT}
T5 = {
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 64,
    "num_layers": 2,
    "num_heads": 4,
    "vocab_size": 64,
    "eos_token_id": 2,
    "decoder_start_token_id": 0,
}
OPT = {"hidden_size": 32, "ffn_dim": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
THREE = {"num_labels": 3}

Made = tuple[Callable[[], nn.Module], dict[str, Tensor]]
TIED: dict[str, Made] = {
    "llama": (
        lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**GROUPED, tie_word_embeddings=True)),
        WORDS,
    ),
    "gemma3": (lambda: hf.Gemma3ForCausalLM(hf.Gemma3TextConfig(**GROUPED)), WORDS),
    "gpt2": (lambda: hf.GPT2LMHeadModel(hf.GPT2Config(**GPT2)), WORDS),
    "opt": (lambda: hf.OPTForCausalLM(hf.OPTConfig(**OPT, **TEXT, word_embed_proj_dim=32)), WORDS),
    "bert": (lambda: hf.BertForMaskedLM(hf.BertConfig(**BERT)), WORDS),
    "t5": (lambda: hf.T5ForConditionalGeneration(hf.T5Config(**T5)), PAIR),
    "bart": (lambda: hf.BartForConditionalGeneration(hf.BartConfig(d_model=32, **BART, **TEXT)), PAIR),
    "whisper": (
        lambda: hf.WhisperForConditionalGeneration(hf.WhisperConfig(**WHISPER)),
        {**sounds(1), "decoder_input_ids": IDS},
    ),
}
CLASSIFIERS: dict[str, Made] = {
    "bert": (lambda: hf.BertForSequenceClassification(hf.BertConfig(**BERT, **THREE)), WORDS),
    "roberta": (
        lambda: hf.RobertaForSequenceClassification(hf.RobertaConfig(**SIZE, **TEXT, **THREE)),
        WORDS,
    ),
    "llama": (lambda: hf.LlamaForSequenceClassification(hf.LlamaConfig(**GROUPED, **THREE)), WORDS),
    "gpt2": (lambda: hf.GPT2ForSequenceClassification(hf.GPT2Config(**GPT2, **THREE)), WORDS),
    "t5": (lambda: hf.T5ForSequenceClassification(hf.T5Config(**T5, **THREE)), WORDS),
    "vit": (
        lambda: hf.ViTForImageClassification(hf.ViTConfig(**SIZE, **PICTURE, **THREE)),
        pixels(2),
    ),
    "dinov2": (
        lambda: hf.Dinov2ForImageClassification(hf.Dinov2Config(**DINOV2, **THREE)),
        pixels(2, 28),
    ),
}
_SMALL = {**GROUPED, "num_hidden_layers": 2}
_CHOSEN = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
_SHARED = {**_CHOSEN, "n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1}
_LATENT = {
    **{**_SMALL, "num_key_value_heads": 4},
    **{"kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8},
    **{**_SHARED, "n_group": 2, "topk_group": 1},
}
_ATTENTION = {"layer_types": ["full_attention", "full_attention"]}
EXPERTS: dict[str, Callable[[], nn.Module]] = {
    **{name: make for name, make in ROUTED.items() if name != "qwen2_moe"},
    "a dense layer first": lambda: hf.Qwen3MoeForCausalLM(
        hf.Qwen3MoeConfig(**_SMALL, **_CHOSEN, num_experts=4, mlp_only_layers=[0])
    ),
    "glm4_moe": lambda: hf.Glm4MoeForCausalLM(hf.Glm4MoeConfig(**_SMALL, **_SHARED)),
    "dots1": lambda: hf.Dots1ForCausalLM(hf.Dots1Config(**_SMALL, **_SHARED, n_group=1, topk_group=1)),
    "deepseek_v2": lambda: hf.DeepseekV2ForCausalLM(hf.DeepseekV2Config(**_LATENT)),
    "deepseek_v3": lambda: hf.DeepseekV3ForCausalLM(hf.DeepseekV3Config(**_LATENT)),
    "minimax": lambda: hf.MiniMaxForCausalLM(
        hf.MiniMaxConfig(**_SMALL, **_ATTENTION, num_local_experts=4, num_experts_per_tok=2)
    ),
    "flex_olmo": lambda: hf.FlexOlmoForCausalLM(
        hf.FlexOlmoConfig(**_SMALL, num_experts=4, num_experts_per_tok=2)
    ),
    "hunyuan": lambda: hf.HunYuanMoEV1ForCausalLM(hf.HunYuanMoEV1Config(**_SMALL, num_experts=4, moe_topk=2)),
    "ernie4_5_moe": lambda: hf.Ernie4_5_MoeForCausalLM(
        hf.Ernie4_5_MoeConfig(
            **_SMALL, moe_num_experts=4, moe_k=2, moe_intermediate_size=24, moe_layer_start_index=1
        )
    ),
    "qwen3_next": lambda: hf.Qwen3NextForCausalLM(
        hf.Qwen3NextConfig(
            **_SMALL, **_CHOSEN, **_ATTENTION, num_experts=4, shared_expert_intermediate_size=40
        )
    ),
    "granitemoe": lambda: hf.GraniteMoeForCausalLM(
        hf.GraniteMoeConfig(**_SMALL, num_local_experts=4, num_experts_per_tok=2)
    ),
}
UNREAD: dict[str, Callable[[], nn.Module]] = {
    "qwen2_moe": ROUTED["qwen2_moe"],
    "phimoe": lambda: hf.PhimoeForCausalLM(
        hf.PhimoeConfig(**_SMALL, num_local_experts=4, num_experts_per_tok=2)
    ),
    "jamba": lambda: hf.JambaForCausalLM(
        hf.JambaConfig(
            **_SMALL,
            num_experts=4,
            num_experts_per_tok=2,
            attn_layer_period=1,
            attn_layer_offset=0,
            expert_layer_period=1,
            expert_layer_offset=0,
            use_mamba_kernels=False,
        )
    ),
}
STILL = ("classifier.", "score.", "classification_head.", "final_logits_bias")

Change = Callable[[str, Tensor], Tensor]


def noise(name: str, tensor: Tensor) -> Tensor:
    """On all but heads, which are kept for their tasks and never merged, and what no training changes."""
    moved = tensor.is_floating_point() and not name.startswith(STILL)
    return tensor + 0.02 * torch.randn_like(tensor) if moved else tensor


def two(
    folder: Path, make: Callable[[], nn.Module], change: Change = noise, *, stacked: bool = False
) -> nn.Module:
    """Base and expert as folders; the base."""
    torch.manual_seed(0)
    base = make().eval()
    with torch.no_grad():  # of the size that trained ones have: others route by chance
        for parameter in base.parameters():
            if parameter.ndim > 1:
                parameter.copy_(0.7 * torch.randn_like(parameter) / parameter.shape[-1] ** 0.5)
    base.save_pretrained(folder / "base", save_original_format=not stacked)
    shutil.copytree(folder / "base", folder / "expert")
    stored = load_file(folder / "base" / "model.safetensors")
    moved = {name: change(name, tensor) for name, tensor in stored.items()}
    save_file(moved, folder / "expert" / "model.safetensors", {"format": "pt"})
    return base


def merged_twice(folder: Path, rank: int | str = 64) -> None:
    """The expert's model, whole and as an adapter."""
    spec = {
        "base": str(folder / "base"),
        "experts": {"a": str(folder / "expert")},
        "merge": {"type": "average"},
        "device": "cpu",
    }
    Pipeline.from_spec(spec).run(folder / "whole")
    Pipeline.from_spec({**spec, "output": {"form": "lora", "rank": rank}}).run(folder / "lora")


def answers(model: nn.Module, given: dict[str, Tensor]) -> Tensor:
    with torch.no_grad():
        if hasattr(model.config, "use_cache"):
            model.config.use_cache = False  # whose class for Qwen3-Next is broken in transformers 5.6
        found: Tensor = model.eval()(**given).logits
    return found.double()


def apart(one: Tensor, other: Tensor) -> float:
    return float((one.double() - other.double()).norm() / other.double().norm())


def with_peft(base: nn.Module, folder: Path) -> peft.PeftModel:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of ties, and of patterns that PEFT itself adds
        return peft.PeftModel.from_pretrained(copy.deepcopy(base), folder)


def check(folder: Path, base: nn.Module, given: dict[str, Tensor]) -> None:
    """PEFT's model answers as the whole one, before its adapter is folded and after."""
    wanted = answers(type(base).from_pretrained(folder / "whole" / "merged"), given)
    adapter = with_peft(base, folder / "lora" / "merged")
    assert apart(answers(base, given), wanted) > 1e-3
    assert apart(answers(adapter, given), wanted) < 1e-5
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of ties
        assert apart(answers(adapter.merge_and_unload(), given), wanted) < 1e-5


@pytest.mark.parametrize("kind", CLASSIFIERS)
def test_a_classifier_gets_an_adapter_that_fits_it(tmp_path: Path, kind: str) -> None:
    make, given = CLASSIFIERS[kind]
    base = two(tmp_path, make)

    merged_twice(tmp_path)

    config = json.loads((tmp_path / "lora" / "merged" / "adapter_config.json").read_text())
    assert config["auto_mapping"]["base_model_class"] == type(base).__name__
    check(tmp_path, base, given)


def test_adapters_on_a_classifier_come_out_as_one_on_it(tmp_path: Path) -> None:
    base = two(tmp_path, CLASSIFIERS["bert"][0])
    folded = adapted(base, tmp_path / "a", target_modules=["query", "value"])
    spec = {
        "base": str(tmp_path / "base"),
        "experts": {"a": {"adapter": str(tmp_path / "a")}},
        "merge": {"type": "average"},
        "output": {"form": "lora", "rank": "exact"},
        "device": "cpu",
    }

    Pipeline.from_spec(spec).run(tmp_path / "lora")

    found = loaded(base, tmp_path / "lora" / "merged")
    assert all(torch.allclose(found[name], tensor, atol=1e-6) for name, tensor in folded.items())


@pytest.mark.parametrize("kind", TIED)
def test_a_tied_tensor_that_changed_stays_tied_in_value(tmp_path: Path, kind: str) -> None:
    make, given = TIED[kind]
    base = two(tmp_path, make)

    merged_twice(tmp_path)

    check(tmp_path, base, given)
    spec = {
        "base": str(tmp_path / "base"),
        "experts": {"a": {"adapter": str(tmp_path / "lora" / "merged")}},
        "merge": {"type": "average"},
        "device": "cpu",
    }
    Pipeline.from_spec(spec).run(tmp_path / "again")
    found, wanted = (load_file(tmp_path / one / "merged" / "model.safetensors") for one in ("again", "whole"))
    assert found.keys() == wanted.keys()
    assert all(torch.allclose(found[name], tensor, atol=1e-6) for name, tensor in wanted.items())


def test_an_adapter_that_unties_is_no_result_on_a_tied_base(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from merging.checkpoints import lora_sink

    two(tmp_path, TIED["llama"][0])
    write = lora_sink.save_file

    def spoilt(tensors: dict[str, Tensor], *rest: Any) -> None:
        write({name: tensor + ("lm_head" in name) for name, tensor in tensors.items()}, *rest)

    monkeypatch.setattr(lora_sink, "save_file", spoilt)

    with pytest.raises(MergingError, match=r'lm_head\.weight: differs from "model\.embed_tokens\.weight"'):
        merged_twice(tmp_path)

    assert not (tmp_path / "lora" / "merged").exists()


@pytest.mark.parametrize("kind", EXPERTS)
def test_experts_that_the_class_holds_stacked_are_changed_by_peft_too(tmp_path: Path, kind: str) -> None:
    base = two(tmp_path, EXPERTS[kind])

    merged_twice(tmp_path)

    check(tmp_path, base, WORDS)


def test_experts_that_the_checkpoint_too_holds_stacked_are_stored_whole(tmp_path: Path) -> None:
    base = two(tmp_path, ROUTED["mixtral"], stacked=True)

    merged_twice(tmp_path)

    check(tmp_path, base, WORDS)
    about = json.loads((tmp_path / "lora" / "merged" / "manifest.json").read_text())["notes"]["adapter"]
    assert "model.layers.0.mlp.experts.gate_up_proj" in about["stored_whole"]


def test_one_expert_of_a_stack_may_change_and_each_by_its_own_rank(tmp_path: Path) -> None:
    def some(name: str, tensor: Tensor) -> Tensor:
        ranks = {"q_proj.weight": 5, "experts.1.w2.weight": 1, "experts.2.w3.weight": 3}
        rank = next((rank for end, rank in ranks.items() if name.endswith(end) and "layers.1." in name), 0)
        if not rank:
            return tensor
        return tensor + 0.05 * torch.randn(len(tensor), rank) @ torch.randn(rank, tensor.shape[-1])

    base = two(tmp_path, ROUTED["mixtral"], some)

    merged_twice(tmp_path, "exact")

    check(tmp_path, base, WORDS)
    about = json.loads((tmp_path / "lora" / "merged" / "manifest.json").read_text())["notes"]["adapter"]
    assert sorted(about["ranks"].values()) == [1, 3, 5]
    names = load_file(tmp_path / "lora" / "merged" / "adapter_model.safetensors")
    assert not any(".layers.0." in name for name in names)


def test_a_classifier_with_experts_gets_both(tmp_path: Path) -> None:
    config = ROUTED["mixtral"]().config
    config.num_labels = 3
    base = two(tmp_path, lambda: hf.MixtralForSequenceClassification(config))

    merged_twice(tmp_path)

    check(tmp_path, base, WORDS)


@pytest.mark.parametrize("kind", UNREAD)
def test_experts_of_which_peft_reads_no_factors_are_refused_by_name(tmp_path: Path, kind: str) -> None:
    two(tmp_path, UNREAD[kind])

    with pytest.raises(
        CheckpointError, match=r"experts\.0\.(down_proj|w1)\.weight: has changed, and is a part"
    ):
        merged_twice(tmp_path)

    assert not (tmp_path / "lora" / "merged").exists()


def test_where_experts_stay_the_base_s_everything_else_may_change(tmp_path: Path) -> None:
    base = two(
        tmp_path,
        ROUTED["qwen2_moe"],
        lambda name, tensor: tensor if ".experts." in name else noise(name, tensor),
    )

    merged_twice(tmp_path)

    check(tmp_path, base, WORDS)


def test_names_that_peft_takes_for_experts_are_those_it_maps() -> None:
    mapped = {layout: frozenset(names) for layout, names in conversion._MOE_TARGET_MODULE_MAPPING.items()}

    assert mapped == TAKEN


@pytest.mark.parametrize("kind", [*CLASSIFIERS, *(f"{name} tied" for name in TIED)])
def test_every_layer_with_a_role_is_one_of_the_class_that_is_loaded(tmp_path: Path, kind: str) -> None:
    make, _ = TIED[kind.removesuffix(" tied")] if kind.endswith(" tied") else CLASSIFIERS[kind]
    model = make()
    model.save_pretrained(tmp_path / "base")
    base = SafetensorsSource(tmp_path / "base")

    outline = outline_of(tmp_path / "base", base.names())

    assert outline.modules.keys() == dict(model.named_modules()).keys()
    assert outline.places.keys() == set(base.names())


def merged_from(folder: Path) -> dict[str, Tensor]:
    spec = {
        "base": str(folder / "base"),
        "experts": {"a": {"adapter": str(folder / "a")}},
        "merge": {"type": "average"},
        "allow": ["other_base", "far_from_base"],  # random factors are large
        "device": "cpu",
    }
    Pipeline.from_spec(spec).run(folder / "out")
    return load_file(folder / "out" / "merged" / "model.safetensors")


@pytest.mark.parametrize("shift", [0.0, 0.5])
@pytest.mark.parametrize("kind", ["llama", "gemma3", "opt"])
def test_factors_on_a_tied_embedding_are_read_with_the_embedding_stored_beside(
    tmp_path: Path, kind: str, shift: float
) -> None:
    base = two(tmp_path, TIED[kind][0])
    adapted(base, tmp_path / "a", target_modules=["embed_tokens", "q_proj"])
    file = tmp_path / "a" / "adapter_model.safetensors"
    stored = load_file(file)
    beside = [name for name in stored if ".base_layer.weight" in name]
    assert len(beside) == 1
    stored[beside[0]] += shift  # an embedding that is not the base's: PEFT loads it into the tensor of both
    save_file(stored, file, {"format": "pt"})
    wanted = loaded(base, tmp_path / "a")

    found = merged_from(tmp_path)

    for name, tensor in found.items():
        assert torch.allclose(tensor, wanted[name], atol=1e-6), name
    assert torch.equal(wanted["lm_head.weight"], wanted[beside_of(beside[0])])
    assert apart(wanted["lm_head.weight"], base.get_input_embeddings().weight.detach()) > 1e-3


def beside_of(name: str) -> str:
    return name.removeprefix("base_model.model.").replace(".base_layer", "")


def test_one_of_two_tied_tensors_saved_whole_is_still_refused(tmp_path: Path) -> None:
    base = two(tmp_path, TIED["llama"][0])
    adapted(base, tmp_path / "a", target_modules=["q_proj"], modules_to_save=["embed_tokens"])

    with pytest.raises(
        CheckpointError, match=r'replaces "model\.embed_tokens\.weight" alone, which the base ties'
    ):
        merged_from(tmp_path)
