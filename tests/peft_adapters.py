"""Adapters that PEFT itself has made, saved and merged."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import peft
import torch
from torch import Tensor, nn


def adapted(model: nn.Module, folder: Path, *, seed: int = 0, **config: Any) -> dict[str, Tensor]:
    """Put a LoRA on the model, save the adapter in the folder, and return what PEFT merges it to.

    The model itself is left as it was. Factors, and whatever else is trained, are random.
    """
    torch.manual_seed(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT warns of layouts that it corrects and of what it saves beside
        config = {"r": 4, "lora_alpha": 6, "init_lora_weights": False, **config}
        wrapped = peft.get_peft_model(copy.deepcopy(model), peft.LoraConfig(**config))
        shift_(wrapped)
        wrapped.save_pretrained(folder)
        merged = wrapped.merge_and_unload()
    return {name: tensor.detach().clone() for name, tensor in merged.state_dict().items()}


def loaded(base: nn.Module, folder: Path) -> dict[str, Tensor]:
    """What PEFT makes of the base and the adapter, merged."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of ties and layouts
        model = peft.PeftModel.from_pretrained(copy.deepcopy(base), folder)
        return {name: tensor.detach() for name, tensor in model.merge_and_unload().state_dict().items()}


def shift_(wrapped: nn.Module) -> None:
    """Move everything that is trained beside the factors, so that it differs from the base."""
    for name, parameter in wrapped.named_parameters():
        if parameter.requires_grad and (
            "lora_" not in name or "magnitude" in name or "lora_B.default.bias" in name
        ):
            parameter.data += 0.1 * torch.rand_like(parameter)
