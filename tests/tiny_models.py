"""Small real models, experts that differ from them by noise, and batches to run them on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import transformers as hf
from torch import Tensor, nn
from transformers.models.whisper.modeling_whisper import WhisperEncoder

from merging.backbones.clip_vision import ClipVision
from merging.backbones.llama import Llama
from merging.backbones.pretrained import TransformersBackbone
from merging.backbones.t5 import T5
from merging.backbones.transformers import AnyTransformers
from merging.backbones.vit import ViT
from merging.checkpoints.source import StateDictSource
from merging.contracts.models import Models
from merging.data.task import CalibrationData, Examples

SIZE = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
PICTURE = {"image_size": 32, "patch_size": 8}
TEXT = {"vocab_size": 64, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
GROUPED = {**SIZE, **TEXT, "num_key_value_heads": 2, "head_dim": 8}
BART = {
    f"{side}_{what}": value
    for side in ("encoder", "decoder")
    for what, value in {"layers": 2, "attention_heads": 4, "ffn_dim": 64}.items()
}


class Given(Examples):
    """Batches as they are."""

    def __init__(self, *batches: Mapping[str, Tensor]) -> None:
        self._batches = batches

    def __len__(self) -> int:
        return sum(len(next(iter(batch.values()))) for batch in self._batches)

    def batches(self) -> tuple[Mapping[str, Tensor], ...]:
        return self._batches

    @property
    def labels(self) -> None:
        return None

    @property
    def fingerprint(self) -> str:
        return "given"

    def hashes(self) -> tuple[str, ...]:
        return ()


def pixels(examples: int, size: int = 32, seed: int = 0) -> dict[str, Tensor]:
    return {
        "pixel_values": torch.randn(examples, 3, size, size, generator=torch.Generator().manual_seed(seed))
    }


def tokens(examples: int, length: int, seed: int = 0) -> dict[str, Tensor]:
    """The first sentence is shorter than the others: it is padded at its end."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.ones(examples, length, dtype=torch.long)
    mask[0, -2:] = 0
    ids = torch.randint(3, 60, (examples, length), generator=generator)
    return {"input_ids": ids * mask, "attention_mask": mask}


def pairs(examples: int, length: int) -> dict[str, Tensor]:
    answers = torch.randint(3, 60, (examples, 4), generator=torch.Generator().manual_seed(examples))
    return {**tokens(examples, length), "decoder_input_ids": answers}


def sounds(examples: int, seed: int = 0) -> dict[str, Tensor]:
    """Spectrograms: 16 bands, 24 frames."""
    return {"input_features": torch.randn(examples, 16, 24, generator=torch.Generator().manual_seed(seed))}


Case = tuple[type[TransformersBackbone], Callable[[], nn.Module], list[dict[str, Tensor]]]

PICTURES = [pixels(3), pixels(2, seed=1)]
SENTENCES = [tokens(3, 7), tokens(2, 5, seed=1)]
PAIRS = [pairs(3, 7), pairs(2, 5)]
PATCHES = [pixels(3, 28), pixels(2, 28, seed=1)]
SOUNDS = [sounds(3), sounds(2, seed=1)]
WHISPER = {"d_model": 32, **BART, **TEXT, "num_mel_bins": 16, "max_source_positions": 12}
DINOV2 = {key: value for key, value in SIZE.items() if key != "intermediate_size"} | {
    "image_size": 28,
    "patch_size": 14,
}

CASES: dict[str, Case] = {
    "clip": (ClipVision, lambda: hf.CLIPVisionModel(hf.CLIPVisionConfig(**SIZE, **PICTURE)), PICTURES),
    "clip_projection": (
        ClipVision,
        lambda: hf.CLIPVisionModelWithProjection(hf.CLIPVisionConfig(**SIZE, **PICTURE, projection_dim=16)),
        PICTURES,
    ),
    "vit": (ViT, lambda: hf.ViTModel(hf.ViTConfig(**SIZE, **PICTURE)), PICTURES),
    "vit_classifier": (
        ViT,
        lambda: hf.ViTForImageClassification(hf.ViTConfig(**SIZE, **PICTURE, num_labels=5)),
        PICTURES,
    ),
    "dinov2": (ViT, lambda: hf.Dinov2Model(hf.Dinov2Config(**DINOV2)), PATCHES),
    "dinov2_classifier": (
        ViT,
        lambda: hf.Dinov2ForImageClassification(hf.Dinov2Config(**DINOV2, num_labels=4)),
        PATCHES,
    ),
    "dinov2_swiglu": (
        ViT,
        lambda: hf.Dinov2Model(hf.Dinov2Config(**DINOV2, use_swiglu_ffn=True)),
        PATCHES,
    ),
    "llama": (Llama, lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**GROUPED)), SENTENCES),
    "llama_tied": (
        Llama,
        lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**GROUPED, tie_word_embeddings=True)),
        SENTENCES,
    ),
    "qwen3": (Llama, lambda: hf.Qwen3ForCausalLM(hf.Qwen3Config(**GROUPED)), SENTENCES),
    "gemma3": (Llama, lambda: hf.Gemma3ForCausalLM(hf.Gemma3TextConfig(**GROUPED)), SENTENCES),
    "bert": (AnyTransformers, lambda: hf.BertModel(hf.BertConfig(**SIZE, vocab_size=64)), SENTENCES),
    "roberta": (
        AnyTransformers,
        lambda: hf.RobertaModel(hf.RobertaConfig(**SIZE, **TEXT)),
        SENTENCES,
    ),
    "mistral": (Llama, lambda: hf.MistralForCausalLM(hf.MistralConfig(**GROUPED)), SENTENCES),
    "gemma2": (Llama, lambda: hf.Gemma2ForCausalLM(hf.Gemma2Config(**GROUPED)), SENTENCES),
    "phi3": (Llama, lambda: hf.Phi3ForCausalLM(hf.Phi3Config(**GROUPED)), SENTENCES),
    "gpt2": (
        AnyTransformers,
        lambda: hf.GPT2LMHeadModel(hf.GPT2Config(n_embd=32, n_layer=2, n_head=4, **TEXT)),
        SENTENCES,
    ),
    "t5": (
        T5,
        lambda: hf.T5ForConditionalGeneration(
            hf.T5Config(
                d_model=32,
                d_kv=8,
                d_ff=64,
                num_layers=2,
                num_heads=4,
                vocab_size=64,
                decoder_start_token_id=0,
            )
        ),
        PAIRS,
    ),
    "whisper_encoder": (AnyTransformers, lambda: WhisperEncoder(hf.WhisperConfig(**WHISPER)), SOUNDS),
    "bart": (AnyTransformers, lambda: hf.BartModel(hf.BartConfig(d_model=32, **BART, **TEXT)), PAIRS),
}


def made(name: str, seed: int = 0) -> tuple[TransformersBackbone, nn.Module, list[dict[str, Tensor]]]:
    """Backbone, model in eval mode and batches of one of the CASES."""
    backbone_class, make, batches = CASES[name]
    torch.manual_seed(seed)
    model = make().eval()
    model.config.architectures = [type(model).__name__]
    return backbone_class(model.config), model, batches


def expert_of(model: nn.Module, seed: int, noise: float = 0.02) -> dict[str, Tensor]:
    """The model's tensors with noise on every floating one."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: tensor + noise * torch.randn(tensor.shape, generator=generator)
        if tensor.is_floating_point()
        else tensor
        for name, tensor in model.state_dict().items()
    }


def opened(
    base: nn.Module | Mapping[str, Tensor],
    experts: Mapping[str, Mapping[str, Tensor]],
    backbone: Any,
    **weights: float,
) -> Models:
    sources = {task: StateDictSource(expert, f'expert "{task}"') for task, expert in experts.items()}
    return Models(
        StateDictSource(base, "base"), sources, {task: weights.get(task, 1.0) for task in experts}, backbone
    )


def same_data(experts: Mapping[str, Any], *batches: Mapping[str, Tensor]) -> CalibrationData:
    return CalibrationData({task: Given(*batches) for task in experts})
