"""Small mixtures of experts, with the tensors that their checkpoints hold."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import transformers as hf
from safetensors.torch import load_file
from tiny_models import GROUPED
from torch import Tensor, nn

from merging.backbones.transformers import AnyTransformers

_SMALL = {**GROUPED, "num_hidden_layers": 2}
_FOUR = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}

ROUTED: dict[str, Callable[[], nn.Module]] = {
    "mixtral": lambda: hf.MixtralForCausalLM(
        hf.MixtralConfig(**_SMALL | {"intermediate_size": 48}, num_local_experts=4, num_experts_per_tok=2)
    ),
    "qwen2_moe": lambda: hf.Qwen2MoeForCausalLM(
        hf.Qwen2MoeConfig(**_SMALL, **_FOUR, shared_expert_intermediate_size=40)
    ),
    "qwen3_moe": lambda: hf.Qwen3MoeForCausalLM(hf.Qwen3MoeConfig(**_SMALL, **_FOUR)),
    "olmoe": lambda: hf.OlmoeForCausalLM(
        hf.OlmoeConfig(**_SMALL | {"intermediate_size": 24}, num_experts=4, num_experts_per_tok=2)
    ),
}


def routed_model(name: str, seed: int = 0) -> tuple[AnyTransformers, nn.Module]:
    """Weights of the size that trained ones have: with those that transformers draws, routing is chance."""
    torch.manual_seed(seed)
    model = ROUTED[name]().eval()
    model.config.architectures = [type(model).__name__]
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.copy_(noise / parameter.shape[-1] ** 0.5)
    return AnyTransformers(model.config), model


def stored(model: nn.Module) -> dict[str, Tensor]:
    """What `save_pretrained` writes."""
    with TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return load_file(Path(folder) / "model.safetensors")


def near(state: dict[str, Tensor], seed: int, noise: float = 0.02) -> dict[str, Tensor]:
    """The tensors with noise on them."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: tensor + noise * torch.randn(tensor.shape, generator=generator)
        for name, tensor in state.items()
    }
