"""Shapes of the models that are benchmarked: their tensors, their configs, and what a block multiplies."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple


class Drawn(NamedTuple):
    """A tensor to draw: normal of this deviation, or ones where it is None."""

    name: str
    shape: tuple[int, ...]
    deviation: float | None


class Linears(NamedTuple):
    """Linears of a block with the same input: its features, and the outputs of all together."""

    inputs: int
    outputs: int


@dataclass(frozen=True)
class Llama:
    """A Llama with an untied head; the defaults are TinyLlama's 1.10 B parameters."""

    hidden: int = 2048
    layers: int = 22
    intermediate: int = 5632
    heads: int = 32
    kv_heads: int = 4
    vocabulary: int = 32000
    dtype: str = "bfloat16"

    @property
    def kv(self) -> int:
        return self.kv_heads * self.hidden // self.heads

    @property
    def linears(self) -> tuple[Linears, ...]:
        """Of a block, in the order in which they run."""
        return (
            Linears(self.hidden, self.hidden + 2 * self.kv),
            Linears(self.hidden, self.hidden),
            Linears(self.hidden, 2 * self.intermediate),
            Linears(self.intermediate, self.hidden),
        )

    def matrices(self) -> dict[str, tuple[int, int]]:
        """The linears of a block by name: outputs x inputs."""
        wide, inner = self.hidden, self.intermediate
        return {
            "self_attn.q_proj": (wide, wide),
            "self_attn.k_proj": (self.kv, wide),
            "self_attn.v_proj": (self.kv, wide),
            "self_attn.o_proj": (wide, wide),
            "mlp.gate_proj": (inner, wide),
            "mlp.up_proj": (inner, wide),
            "mlp.down_proj": (wide, inner),
        }

    def tensors(self) -> Iterator[Drawn]:
        yield Drawn("model.embed_tokens.weight", (self.vocabulary, self.hidden), 0.02)
        for layer in range(self.layers):
            block = f"model.layers.{layer}"
            for name, shape in self.matrices().items():
                yield Drawn(f"{block}.{name}.weight", shape, 0.02)
            for norm in ("input_layernorm", "post_attention_layernorm"):
                yield Drawn(f"{block}.{norm}.weight", (self.hidden,), None)
        yield Drawn("model.norm.weight", (self.hidden,), None)
        yield Drawn("lm_head.weight", (self.vocabulary, self.hidden), 0.02)

    def config(self) -> dict[str, Any]:
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "vocab_size": self.vocabulary,
            "hidden_act": "silu",
            "max_position_embeddings": 2048,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "tie_word_embeddings": False,
            "torch_dtype": self.dtype,
            "bos_token_id": 1,
            "eos_token_id": 2,
        }


@dataclass(frozen=True)
class ClipVision:
    """CLIP's vision tower; the defaults are ViT-B/32."""

    hidden: int = 768
    layers: int = 12
    intermediate: int = 3072
    heads: int = 12
    patch: int = 32
    image: int = 224
    dtype: str = "float32"

    @property
    def tokens(self) -> int:
        """Of one picture, the class token among them."""
        return (self.image // self.patch) ** 2 + 1

    @property
    def linears(self) -> tuple[Linears, ...]:
        """Of a block, in the order in which they run."""
        return (
            Linears(self.hidden, 3 * self.hidden),
            Linears(self.hidden, self.hidden),
            Linears(self.hidden, self.intermediate),
            Linears(self.intermediate, self.hidden),
        )

    def tensors(self) -> Iterator[Drawn]:
        wide, inner, top = self.hidden, self.intermediate, "vision_model"
        yield Drawn(f"{top}.embeddings.class_embedding", (wide,), 0.02)
        yield Drawn(f"{top}.embeddings.patch_embedding.weight", (wide, 3, self.patch, self.patch), 0.02)
        yield Drawn(f"{top}.embeddings.position_embedding.weight", (self.tokens, wide), 0.02)
        yield from _norm(f"{top}.pre_layrnorm", wide)
        yield from _norm(f"{top}.post_layernorm", wide)
        for layer in range(self.layers):
            block = f"{top}.encoder.layers.{layer}"
            for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
                yield from _linear(f"{block}.self_attn.{name}", wide, wide)
            yield from _norm(f"{block}.layer_norm1", wide)
            yield from _norm(f"{block}.layer_norm2", wide)
            yield from _linear(f"{block}.mlp.fc1", inner, wide)
            yield from _linear(f"{block}.mlp.fc2", wide, inner, gain=0.5)

    def config(self) -> dict[str, Any]:
        return {
            "architectures": ["CLIPVisionModel"],
            "model_type": "clip_vision_model",
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "image_size": self.image,
            "patch_size": self.patch,
            "num_channels": 3,
            "hidden_act": "quick_gelu",
            "layer_norm_eps": 1e-5,
            "attention_dropout": 0.0,
            "projection_dim": 512,
            "torch_dtype": self.dtype,
        }


def parameters(shape: Llama | ClipVision) -> int:
    return sum(math.prod(drawn.shape) for drawn in shape.tensors())


def _linear(name: str, outputs: int, inputs: int, gain: float = 1.0) -> Iterator[Drawn]:
    yield Drawn(f"{name}.weight", (outputs, inputs), gain / math.sqrt(inputs))
    yield Drawn(f"{name}.bias", (outputs,), 0.01)


def _norm(name: str, features: int) -> Iterator[Drawn]:
    yield Drawn(f"{name}.weight", (features,), None)
    yield Drawn(f"{name}.bias", (features,), 0.01)
