"""Experts without the base's output head: classifiers and bare backbones of a language model."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from torch import nn

from merging.backbones.task_heads import has_output, is_backbone_of, is_of_a_task
from merging.checkpoints.folder import config as read_config
from merging.checkpoints.lora import is_adapter
from merging.checkpoints.lora_config import CONFIG
from merging.checkpoints.names import NameMap
from merging.evaluation.metrics import metric
from merging.spec import PipelineSpec

_ADAPTED = ("SEQ_CLS", "TOKEN_CLS", "QUESTION_ANS")  # what PEFT calls the tasks with a head of their own


def lacks_output(folder: Path, base: Path) -> bool:
    """Whether the class of that model or adapter has not the output head that the base's class has, by their
    configs."""
    whole = _architecture(base)
    return has_output(whole) and (has_own_head(folder) or is_backbone_of(_architecture(folder), whole))


def has_own_head(folder: Path) -> bool:
    """Whether that model or adapter has a head of one task."""
    if is_adapter(folder):
        return json.loads((folder / CONFIG).read_text("utf-8-sig")).get("task_type") in _ADAPTED
    return is_of_a_task(_architecture(folder))


def output_head(model: nn.Module | None, names: NameMap) -> frozenset[str]:
    """Stored tensors of a model class that only its own output needs: all outside its backbone."""
    inner = getattr(model, "base_model", None)
    if model is None or not isinstance(inner, nn.Module):
        return frozenset()
    if inner is not model:
        prefix = f"{model.base_model_prefix}."
        return frozenset(name for name, place in names.renamed.items() if not place.startswith(prefix))
    output = getattr(model, "get_output_embeddings", lambda: None)()
    own = tuple(f"{name}." for name, module in model.named_modules() if module is output)
    return frozenset(name for name, place in names.renamed.items() if own and place.startswith(own))


def only_heads_read(spec: PipelineSpec, base: Path, experts: Iterable[Path]) -> bool:
    """Whether the base has an output head that no expert has, and that no metric asks for."""
    folders = tuple(experts)
    if not folders or not all(lacks_output(folder, base) for folder in folders):
        return False
    return all(metric(task.metric).reads_head for task in spec.tasks.values())


def _architecture(folder: Path) -> str:
    names = (read_config(folder) or {}).get("architectures") or ("",)
    return str(names[0])
