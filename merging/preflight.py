"""Pre-flight: what may be wrong with experts whose names and shapes fit, found before the work begins.

Every finding has a name; the spec's `allow` lets findings of that name through.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from merging.checkpoints.folder import config as read_config
from merging.checkpoints.source import CheckpointSource
from merging.contracts.models import Models
from merging.errors import CheckpointError, Problem

NAMES = ("config", "other_base")
OTHER_BASE = 0.3  # cosine of the matrices: fine-tuning leaves it near 1, another start gives about 0
SAMPLED_ROWS = 64  # of each matrix

_HARMLESS = re.compile(
    r"_.*|transformers_version|(torch_)?dtype|architectures|id2label|label2id|num_labels|problem_type|use_cache"
    r"|return_dict|output_.*|.*drop.*|initializer_.*|.*_token_id|task_specific_params|tie_word_embeddings"
    r"|gradient_checkpointing|vocab_size|name_or_path|finetuning_task|max_length|torchscript|logit_scale.*"
)


class Finding(NamedTuple):
    """`name` is what `allow` may list."""

    name: str
    problem: Problem


def refuse_unless_allowed(findings: Sequence[Finding], allow: Sequence[str]) -> tuple[str, ...]:
    """Raise CheckpointError with all findings that are not allowed; the others, as remarks for the report."""
    stopping = [finding for finding in findings if finding.name not in allow]
    if stopping:
        names = ", ".join(f'"{name}"' for name in dict.fromkeys(finding.name for finding in stopping))
        raise CheckpointError(
            "the experts and the base do not belong together",
            problems=[finding.problem for finding in stopping],
            remedy=f'If that is meant, let it through with "allow": [{names}] in the spec.',
        )
    return tuple(f"allowed: {finding.problem}" for finding in findings)


def config_findings(base: Path, experts: Mapping[str, Path]) -> list[Finding]:
    """Config fields that change what the weights mean, where an expert's differ from the base's."""
    ours = _architecture(base)
    findings = []
    for label, folder in experts.items():
        theirs = _architecture(folder)
        if not ours or not theirs:
            continue
        differing = [key for key in ours if key in theirs and ours[key] != theirs[key]]
        if differing:
            shown = "; ".join(f"{key} {theirs[key]!r}, the base has {ours[key]!r}" for key in differing[:5])
            more = f"; and {len(differing) - 5} more" if len(differing) > 5 else ""
            findings.append(Finding("config", Problem(label, f"its config says otherwise: {shown}{more}")))
    return findings


def weight_findings(models: Models) -> list[Finding]:
    """Experts whose matrices have nothing in common with the base's, from the first rows of each matrix."""
    findings = []
    for expert in models.experts.values():
        cosine = _cosine(models, expert)
        if cosine is not None and cosine < OTHER_BASE:
            what = (
                f"its matrices have a cosine of {cosine:.2f} to the base's: it was trained from another base"
            )
            findings.append(Finding("other_base", Problem(expert.label, what)))
    return findings


def not_finite(models: Models) -> list[Problem]:
    """Every tensor of base and experts that holds NaN or infinity, with how many. Reads all weights."""
    problems = []
    for source in (models.base, *models.experts.values()):
        for name in models.base.names():
            if not source.spec(name).dtype.is_floating_point:
                continue
            bad = int((~torch.isfinite(source.read(name))).sum())
            if bad:
                problems.append(Problem(f"{source.label}: {name}", f"{bad} values are NaN or infinite"))
    return problems


def _cosine(models: Models, expert: CheckpointSource) -> float | None:
    dot = ours = theirs = 0.0
    for name in models.base.names():
        spec = models.base.spec(name)
        if len(spec.shape) < 2 or not spec.dtype.is_floating_point or name in models.kept:
            continue
        rows = slice(0, min(SAMPLED_ROWS, spec.shape[0]))
        a, b = (source.read(name, rows).double().flatten() for source in (models.base, expert))
        if not bool(torch.isfinite(a).all() and torch.isfinite(b).all()):
            continue
        dot, ours, theirs = dot + float(a @ b), ours + float(a @ a), theirs + float(b @ b)
    return dot / (ours * theirs) ** 0.5 if ours > 0 and theirs > 0 else None


def _architecture(folder: Path) -> dict[str, Any]:
    """Flat config without what does not change the meaning of weights; a whole CLIP counts as its tower."""
    found = _filled(folder)
    vision = found.get("vision_config")
    return _flat(vision if isinstance(vision, Mapping) else found)


def _filled(folder: Path) -> Mapping[str, Any]:
    """The config with transformers' defaults, where it knows the architecture."""
    raw = read_config(folder)
    if raw is None or "model_type" not in raw:
        return raw or {}
    from transformers import AutoConfig

    try:
        place = folder if folder.is_dir() else folder.parent
        filled = AutoConfig.from_pretrained(place, local_files_only=True, trust_remote_code=False)
    except (ValueError, OSError, KeyError):
        return raw
    return filled.to_dict()


def _flat(values: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if _HARMLESS.fullmatch(key) or key == "model_type":
            continue
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{path}{key}.")
        else:
            flat[f"{path}{key}"] = list(value) if isinstance(value, tuple) else value
    return flat
