"""Adapters that PEFT wrote for one small Llama, and plain mathematics on what they add."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from peft_adapters import adapted
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from merging.checkpoints.lora import LoraSource, open_adapter
from merging.checkpoints.safetensors import SafetensorsSource

ADAPTERS = {  # ranks, scalings and targets differ
    "a": {"r": 2, "lora_alpha": 5, "target_modules": ["q_proj", "down_proj"]},
    "b": {"r": 4, "lora_alpha": 3, "target_modules": ["q_proj", "v_proj"], "use_rslora": True},
    "c": {"r": 3, "lora_alpha": 3, "target_modules": ["q_proj", "v_proj", "down_proj"]},
}


class Workshop:
    """A base, experts on it by name, and all tensors of the base."""

    def __init__(self, base: SafetensorsSource, experts: Mapping[str, LoraSource], folder: Path) -> None:
        self.base, self.experts, self.folder = base, experts, folder
        self.tensors = {name: base.read(name) for name in base.names()}

    def deltas(self, name: str) -> Tensor:
        """N O I"""
        return torch.stack(
            [
                expert.read(name).double() - self.tensors[name].double()
                for _, expert in sorted(self.experts.items())
            ]
        )

    def full(self) -> dict[str, dict[str, Tensor]]:
        """The experts as full checkpoints in float64."""
        return {
            task: {name: expert.read(name).double() for name in self.base.names()}
            for task, expert in self.experts.items()
        }


@pytest.fixture(scope="session")
def llamas(tmp_path_factory) -> Workshop:
    folder = tmp_path_factory.mktemp("llamas")
    torch.manual_seed(0)
    size = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(**size, vocab_size=64, num_key_value_heads=2)).eval()
    model.save_pretrained(folder / "base")
    base = SafetensorsSource(folder / "base")
    experts = {}
    for seed, (task, config) in enumerate(ADAPTERS.items()):
        adapted(model, folder / task, seed=seed, **config)
        experts[task] = open_adapter(folder / task, base, model, f'expert "{task}"')
    return Workshop(base, experts, folder)
