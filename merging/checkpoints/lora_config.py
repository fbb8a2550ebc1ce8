"""adapter_config.json: what a PEFT adapter does to its base; what is more than LoRA or DoRA is refused."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from merging.checkpoints.module_patterns import ModulePatterns
from merging.errors import CheckpointError, Problem
from merging.spec.text import json_value
from merging.spec.wording import shortened

CONFIG = "adapter_config.json"
FOLD = (
    "Fold it into its base with PEFT first (PeftModel.from_pretrained(base, adapter).merge_and_unload(), "
    'then save_pretrained), and give the result as "model".'
)

_AGAIN = "Download or copy it again, or correct it by hand."
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
_SHOWN = 10  # problems of one file
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
_NEVER_NULL = ("r", "lora_alpha", "rank_pattern", "alpha_pattern", "bias")  # PEFT cannot load them so

Rank = Annotated[int, Field(gt=0, lt=1 << 31)]


class LoraConfig(BaseModel):
    """The fields that decide what an adapter's tensors mean, under PEFT's own names."""

    model_config = ConfigDict(frozen=True, extra="allow", allow_inf_nan=False, strict=True)

    peft_type: str = "LORA"
    base_model_name_or_path: str | None = None
    r: Rank = 8
    lora_alpha: float = 8
    rank_pattern: dict[str, Rank] = {}
    alpha_pattern: dict[str, float] = {}
    use_rslora: bool = False
    use_dora: bool = False
    lora_bias: bool = False
    fan_in_fan_out: bool = False
    bias: Literal["none", "all", "lora_only"] = "none"
    init_lora_weights: bool | str | None = True

    def rank(self, module: str) -> int:
        """The rank that the config gives to a module, named as in the adapter."""
        return int(self.ranks.value(module, self.r))

    def scale(self, module: str) -> float:
        """The factor of B A: alpha / r, rank-stabilised alpha / sqrt(r)."""
        alpha, rank = float(self.alphas.value(module, self.lora_alpha)), self.rank(module)
        return alpha / math.sqrt(rank) if self.use_rslora else alpha / rank

    @cached_property
    def ranks(self) -> ModulePatterns:
        return ModulePatterns(self.rank_pattern, "rank_pattern")

    @cached_property
    def alphas(self) -> ModulePatterns:
        return ModulePatterns(self.alpha_pattern, "alpha_pattern")


def read_config(folder: Path, label: str) -> LoraConfig:
    """Raises CheckpointError for a config that is damaged, or that asks for more than this package reads."""
    file = folder / CONFIG
    if not file.is_file():
        raise CheckpointError(f"{folder} is not an adapter: it has no {CONFIG}", remedy=_instead(folder))
    try:
        found = json_value(file.read_bytes().decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} is not valid JSON: {error}", remedy=_AGAIN) from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{file} holds a {type(found).__name__}, expected an object")
    return checked(found, label, file)


def _instead(folder: Path) -> str:
    if (folder / "config.json").is_file():
        return 'It looks like a full checkpoint: name it under "model".'
    inside = sorted(found.parent.name for found in folder.glob(f"*/{CONFIG}")) if folder.is_dir() else []
    return f"Name the folder of one in it: {', '.join(inside[:5])}." if inside else ""


def checked(found: Mapping[str, Any], label: str, file: Path | str = CONFIG) -> LoraConfig:
    """The config as an object, its values of the right kind, its fields among those that are understood."""
    kind = found.get("peft_type", "LORA")
    if not isinstance(kind, str):
        raise CheckpointError(
            f'{label}: "peft_type" in {file} is {shortened(json.dumps(kind))}, expected "LORA"', remedy=_AGAIN
        )
    if kind != "LORA":
        raise CheckpointError(
            f'{label} is a {kind} adapter ("peft_type" in {file}); LoRA is read, other kinds are not',
            remedy=FOLD,
        )
    problems = [Problem(f"{label}: {field}", what) for field, what in _unreadable(found)]
    if problems:
        raise CheckpointError(f"{label} is more than a plain LoRA", problems=problems, remedy=FOLD)
    try:
        config = LoraConfig.model_validate(
            {key: value for key, value in found.items() if value is not None or key in _NEVER_NULL}
        )
    except ValidationError as error:
        what = [
            Problem(shortened(".".join(map(str, one["loc"]))), _wrong(one)) for one in error.errors()[:_SHOWN]
        ]
        raise CheckpointError(f"{file} is damaged", problems=what, remedy=_AGAIN) from error
    try:
        _ = config.ranks, config.alphas
    except CheckpointError as error:
        raise CheckpointError(f"{file} is damaged or unsafe: {error.message}", remedy=error.remedy) from error
    return config


def _wrong(one: Mapping[str, Any]) -> str:
    found = one["input"]
    if found is None:
        return f"{one['msg']}, found null"
    said = "a number of very many digits" if type(found) is int and abs(found) > 1 << 64 else repr(found)
    return f"{one['msg']}, found {shortened(said)}"


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
