"""Dense: the layer that some model classes put between what a model gives and the classifier.

Shape letters: B examples, F feature of the model, H feature of the classifier.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from merging.data.hashing import tensors_hash

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "tanh": torch.tanh,
    "relu": functional.relu,
    "gelu": functional.gelu,
}

_AFTER_TOKENS = {  # model type -> the activation of its classes for sequences, which read the first token
    **dict.fromkeys(
        ("roberta", "roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl", "camembert", "esm"), "tanh"
    ),
    **dict.fromkeys(("data2vec-text", "mpnet"), "tanh"),
    "electra": "gelu",
    "distilbert": "relu",
}
_AFTER_POOLER = dict.fromkeys(("bert", "ernie", "albert", "megatron-bert", "rembert", "layoutlm"), "tanh")
_NAMES = ("dense", "pre_classifier", "pooler")


class Dense(NamedTuple):
    """What a classifier reads: activation(features @ weight^T + bias), in place of the features."""

    weight_HF: Tensor
    bias_H: Tensor
    activation: str  # of ACTIVATIONS

    def __call__(self, features_BF: Tensor) -> Tensor:
        weight_HF, bias_H = self.weight_HF.to(features_BF), self.bias_H.to(features_BF)
        return ACTIVATIONS[self.activation](features_BF @ weight_HF.T + bias_H)

    @property
    def fingerprint(self) -> str:
        return f"{self.activation}-{tensors_hash([self.weight_HF, self.bias_H])}"


def dense_of(
    tensors: Mapping[str, Tensor], classifier: str, config: Mapping[str, Any] | None
) -> Dense | None:
    """The layer before that classifier, by how the class of the expert's `config` runs it; None where there
    is not exactly one that is known. `tensors`: those of the expert's head."""
    others = {name.rpartition(".")[0] for name in tensors} - {classifier}
    if len(others) != 1:
        return None
    (module,) = others
    weight, bias = tensors.get(f"{module}.weight"), tensors.get(f"{module}.bias")
    activation = _activation(module, config or {})
    known = module.split(".")[-1] in _NAMES and activation in ACTIVATIONS
    if not known or weight is None or bias is None or weight.ndim != 2 or bias.shape != weight.shape[:1]:
        return None
    if weight.shape[0] != tensors[f"{classifier}.weight"].shape[-1]:
        return None
    return Dense(weight, bias, activation)


def _activation(module: str, config: Mapping[str, Any]) -> str:
    kind = str(config.get("model_type"))
    if kind in ("deberta", "deberta-v2"):
        return str(config.get("pooler_hidden_act", "gelu"))
    table = _AFTER_POOLER if "pooler" in module.split(".") else _AFTER_TOKENS
    return table.get(kind, "")
