"""Tiny models of transformers, random but fixed, made anew for each test that asks for one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

SIZE = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
IMAGE = {"image_size": 32, "patch_size": 8}
TOKENS = {"vocab_size": 64, "bos_token_id": 1, "eos_token_id": 2}
LLAMA = {**SIZE, **TOKENS, "num_key_value_heads": 2}
TEXT = {**SIZE, **TOKENS, "max_position_embeddings": 16}


def _models() -> dict[str, Callable[..., torch.nn.Module]]:
    import transformers as t

    return {
        "clip_vision": lambda **more: t.CLIPVisionModel(t.CLIPVisionConfig(**SIZE, **IMAGE, **more)),
        "clip": lambda **more: t.CLIPModel(
            t.CLIPConfig(
                vision_config=dict(**SIZE, **IMAGE), text_config=dict(TEXT), projection_dim=16, **more
            )
        ),
        "vit": lambda **more: t.ViTModel(t.ViTConfig(**SIZE, **IMAGE, **more)),
        "vit_classifier": lambda **more: t.ViTForImageClassification(
            t.ViTConfig(**SIZE, **IMAGE, **{"num_labels": 3, **more})
        ),
        "dinov2": lambda **more: t.Dinov2Model(t.Dinov2Config(**SIZE, **IMAGE, mlp_ratio=2, **more)),
        "llama": lambda **more: t.LlamaForCausalLM(t.LlamaConfig(**{**LLAMA, **more})),
        "llama_tied": lambda **more: t.LlamaForCausalLM(
            t.LlamaConfig(**{**LLAMA, **more}, tie_word_embeddings=True)
        ),
        "t5": lambda **more: t.T5ForConditionalGeneration(
            t.T5Config(
                d_model=32,
                d_kv=8,
                d_ff=64,
                num_layers=2,
                num_heads=4,
                vocab_size=64,
                decoder_start_token_id=0,
            )
        ),
        "bert": lambda **more: t.BertModel(t.BertConfig(**SIZE, vocab_size=64, **more)),
        "gpt2": lambda **more: t.GPT2LMHeadModel(
            t.GPT2Config(
                n_embd=32, n_layer=2, n_head=4, vocab_size=64, n_positions=16, bos_token_id=1, eos_token_id=2
            )
        ),
        "mixtral": lambda **more: t.MixtralForCausalLM(
            t.MixtralConfig(
                **{**LLAMA, "intermediate_size": 48}, num_local_experts=4, num_experts_per_tok=2, **more
            )
        ),
    }


@pytest.fixture(scope="session")
def tiny() -> Callable[..., torch.nn.Module]:
    """`tiny("llama", vocab_size=70)`: a small model of that kind, its weights fixed by `seed`."""
    models = _models()

    def make(kind: str, *, seed: int = 0, **settings: object) -> torch.nn.Module:
        torch.manual_seed(seed)
        return models[kind](**settings).eval()

    return make
