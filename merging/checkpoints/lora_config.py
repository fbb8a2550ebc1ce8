"""adapter_config.json: what a PEFT adapter does to its base; what is more than LoRA or DoRA is refused."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from merging.errors import CheckpointError, Problem

CONFIG = "adapter_config.json"
FOLD = (
    "Fold it into its base with PEFT first (PeftModel.from_pretrained(base, adapter).merge_and_unload(), "
    'then save_pretrained), and give the result as "model".'
)

_REFUSED = {
    "target_parameters": "adapts parameters that are not the weight of a layer",
    "trainable_token_indices": "trains single rows of an embedding",
    "layer_replication": "repeats layers, which the base does not have",
    "alora_invocation_tokens": "acts on some tokens only, so that no merged weight is the same",
    "use_qalora": "pools its inputs",
    "use_bdlora": "has block-diagonal factors",
    "arrow_config": "chooses among adapters token by token",
    "kasa_config": "takes singular components out of the base",
    "monteclora_config": "samples its weights",
    "velora_config": "is a variant",
    "megatron_config": "is cut for several devices",
    "loftq_config": "started from a quantised base",
    "corda_config": "started from a base that was changed",
    "lora_ga_config": "started from a base that was changed",
}
_STARTS_FROM_THE_BASE = (True, False, None, "gaussian", "orthogonal", "eva")  # values of init_lora_weights
_REPEATS = 3  # "*", "+" or "{" in one pattern of module names
_WITHOUT_EFFECT = {  # on what the adapter's tensors mean
    "auto_mapping",
    "ensure_weight_tying",
    "eva_config",
    "exclude_modules",
    "inference_mode",
    "layers_pattern",
    "layers_to_transform",
    "lora_dropout",
    "megatron_core",
    "modules_to_save",
    "peft_version",
    "qalora_group_size",
    "revision",
    "runtime_config",
    "target_modules",
    "task_type",
    "unsloth_fixed",
}


class LoraConfig(BaseModel):
    """The fields that decide what an adapter's tensors mean, under PEFT's own names."""

    model_config = ConfigDict(frozen=True, extra="allow", allow_inf_nan=False)

    peft_type: str = "LORA"
    base_model_name_or_path: str | None = None
    r: int = Field(default=8, gt=0)
    lora_alpha: float = 8
    rank_pattern: dict[str, int] | None = None
    alpha_pattern: dict[str, float] | None = None
    use_rslora: bool = False
    use_dora: bool = False
    lora_bias: bool = False
    fan_in_fan_out: bool = False
    bias: Literal["none", "all", "lora_only"] = "none"
    init_lora_weights: bool | str | None = True

    def rank(self, module: str) -> int:
        """The rank that the config gives to a module, named as in the adapter."""
        return _by_pattern(self.rank_pattern or {}, module, self.r)

    def scale(self, module: str) -> float:
        """The factor of B A: alpha / r, rank-stabilised alpha / sqrt(r)."""
        alpha, rank = _by_pattern(self.alpha_pattern or {}, module, self.lora_alpha), self.rank(module)
        return alpha / math.sqrt(rank) if self.use_rslora else alpha / rank


def read_config(folder: Path, label: str) -> LoraConfig:
    """Raises CheckpointError for a config that is damaged, or that asks for more than this package reads."""
    file = folder / CONFIG
    if not file.is_file():
        full = (folder / "config.json").is_file()
        raise CheckpointError(
            f"{folder} is not an adapter: it has no {CONFIG}",
            remedy='It looks like a full checkpoint: name it under "model".' if full else "",
        )
    try:
        found = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{file} holds a {type(found).__name__}, expected an object")
    return checked(found, label, file)


def checked(found: Mapping[str, Any], label: str, file: Path | str = CONFIG) -> LoraConfig:
    """The config as an object, its values of the right kind, its fields among those that are understood."""
    kind = found.get("peft_type", "LORA")
    if kind != "LORA":
        raise CheckpointError(
            f'{label} is a {kind} adapter ("peft_type" in {file}); LoRA is read, other kinds are not',
            remedy=FOLD,
        )
    problems = [Problem(f"{label}: {field}", what) for field, what in _unreadable(found)]
    if problems:
        raise CheckpointError(f"{label} is more than a plain LoRA", problems=problems, remedy=FOLD)
    try:
        config = LoraConfig.model_validate({key: value for key, value in found.items() if value is not None})
        for pattern in (*(config.rank_pattern or {}), *(config.alpha_pattern or {})):
            re.compile(pattern)
            _refuse_endless(pattern, file)
    except ValidationError as error:
        what = [Problem(".".join(map(str, one["loc"])), one["msg"]) for one in error.errors()]
        raise CheckpointError(f"{file} is damaged", problems=what) from error
    except re.error as error:
        raise CheckpointError(f"{file} is damaged: a pattern cannot be read: {error}") from error
    return config


def _refuse_endless(pattern: str, file: Path | str) -> None:
    """Raises CheckpointError for a pattern that can be matched in so many ways that matching may not end."""
    plain = re.sub(r"\\.|\[[^\]]*\]", "x", pattern)
    if re.search(r"\)[*+{]", plain) or len(re.findall(r"[*+{]", plain)) > _REPEATS:
        raise CheckpointError(
            f'{file} is unsafe: its pattern "{pattern[:80]}" repeats a group, or has more than {_REPEATS} '
            "repetitions: matching it may take for ever",
            remedy="Name the modules in full instead, as they are named in the adapter's tensors.",
        )


def _unreadable(found: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(field, what it means) of all that would make the tensors mean something else."""
    unreadable = [
        (field, f"{what}; this is not read") for field, what in _REFUSED.items() if found.get(field)
    ]
    start = found.get("init_lora_weights", True)
    if start not in _STARTS_FROM_THE_BASE:
        what = f'"{start}" takes a part of the base into the adapter: its base is not the model given'
        unreadable.append(("init_lora_weights", what))
    known = {*_REFUSED, *_WITHOUT_EFFECT, *LoraConfig.model_fields}
    unknown = sorted(field for field, value in found.items() if value and field not in known)
    return unreadable + [(field, "is a field that this version does not know") for field in unknown]


def _by_pattern(patterns: Mapping[str, Any], module: str, default: Any) -> Any:
    """PEFT's rule: the first pattern that matches the name's end, from a dot on."""
    for pattern, value in patterns.items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            return value
    return default
