"""NaN and infinity in the weights that a run reads, found before the run.

No rule lets such a value through, so finding one stops the run, whatever the spec allows; a tensor that the
spec leaves out is not looked at where no model is run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from merging.checkpoints.finite_files import WEIGHTS, Counts, FiniteFiles
from merging.checkpoints.hashing import FileHashes
from merging.checkpoints.source import CheckpointSource
from merging.components import calibrators, strategies
from merging.contracts.method import Progress, silent
from merging.contracts.models import Models
from merging.errors import CheckpointError, Problem
from merging.layer_settings import LayerSettings
from merging.threads import in_threads

if TYPE_CHECKING:
    from merging.opened import Opened
    from merging.spec import PipelineSpec


def refuse_not_finite(
    spec: PipelineSpec, opened: Opened, *, read: bool = True, progress: Progress = silent
) -> None:
    """Raise CheckpointError that names model, tensor and count of all values that are NaN or infinite.

    Every byte of all weights is read, unless an earlier run has done so. `read`: else only what is remembered
    counts."""
    files = _files_with_some(opened, read=read, progress=progress)
    models, base = opened.models, opened.models.base
    names = base.names()
    problems = {"base": _listed(base, names)} if "base" in files else {}
    if "merged" in files and opened.merged is not None:
        problems["merged"] = _listed(opened.merged, names)
    for task, source in models.experts.items():
        if found := files.get(role := f'expert "{task}"'):
            problems[role] = _of_expert(spec, opened, task, source, found, base=problems.get("base", {}))
    if any(problems.values()):
        raise refusal([problem for listed in problems.values() for problem in listed.values()])


def not_finite(models: Models) -> list[Problem]:
    """Every tensor of base and experts that holds NaN or infinity, with how many. Reads all weights."""
    names = models.base.names()
    sources = (models.base, *models.experts.values())
    return [problem for source in sources for problem in _listed(source, names).values()]


def refusal(problems: Sequence[Problem]) -> CheckpointError:
    return CheckpointError(
        "the inputs hold values that are not finite",
        problems=problems,
        remedy="Leave these experts out, or get them again.",
    )


def _files_with_some(opened: Opened, *, read: bool, progress: Progress) -> dict[str, dict[Path, Counts]]:
    """Role -> its files that hold such values, and in which of their tensors."""
    known = FiniteFiles(FileHashes())
    files = [
        (role, file)
        for role, given in opened.inputs.items()
        for file in given.files
        if file.name.endswith(WEIGHTS)
    ]
    counts = {file: known.recalled(file) for _, file in files}
    unknown = [file for file, found in counts.items() if found is None] if read else []
    for done, found in enumerate(in_threads(known.of, unknown, torch.get_num_threads()), 1):
        counts[unknown[done - 1]] = found
        progress("read weights", done, len(unknown))
    known.save()
    bad: dict[str, dict[Path, Counts]] = {}
    for role, file in files:
        if of_file := counts[file]:
            bad.setdefault(role, {})[file] = of_file
    return bad


def _of_expert(
    spec: PipelineSpec,
    opened: Opened,
    task: str,
    source: CheckpointSource,
    files: Mapping[Path, Counts],
    base: Mapping[str, Problem],
) -> dict[str, Problem]:
    """By the base's names, where the values matter to this run. `base`: what is wrong with the base."""
    models, runs = opened.models, bool(spec.tasks) or _runs_models(spec)
    kept = frozenset() if runs else LayerSettings(spec.merge.layers).applied(models).kept
    adapter = spec.experts[task].adapter is not None
    names = [name for name in models.base.names() if name not in kept and not (adapter and name in base)]
    found = _listed(source, names)
    heads = opened.heads.get(task, {}) if runs else {}
    for name in heads:
        if name not in models.base.names() and (bad := _count(heads[name])):
            found[name] = _problem(source, name, bad)
    if adapter and found:  # what is spoilt there are products; the factors are what can be mended
        stored = [f"{name} ({count})" for counts in files.values() for name, count in counts.items()]
        what = f"stores them in {', '.join(stored[:3])}{', ...' if len(stored) > 3 else ''}"
        found[""] = Problem(f"{source.label}: {min(files).name}", what)
    return found


def _listed(source: CheckpointSource, names: Iterable[str]) -> dict[str, Problem]:
    found = {}
    for name in names:
        if source.spec(name).dtype.is_floating_point and (bad := _count(source.read(name))):
            found[name] = _problem(source, name, bad)
    return found


def _count(tensor: Tensor) -> int:
    return int((~torch.isfinite(tensor)).sum())


def _problem(source: CheckpointSource, name: str, bad: int) -> Problem:
    return Problem(f"{source.label}: {name}", f"{bad} values are NaN or infinite")


def _runs_models(spec: PipelineSpec) -> bool:
    methods = [strategies.get(spec.merge.type), *(calibrators.get(one.type) for one in spec.calibrate)]
    return any("data" in method.needs for method in methods)
