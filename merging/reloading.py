"""reload_check: a checkpoint is opened again, and run on one example, before it is shown under its name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from merging.architecture import select_backbone
from merging.checkpoints.lora import WEIGHTS, LoraSource, is_adapter
from merging.checkpoints.lora_config import read_config as read_adapter_config
from merging.checkpoints.safetensors import SafetensorsSource
from merging.checkpoints.source import CheckpointSource
from merging.contracts.backbone import Backbone, Batch
from merging.data.task import Examples, Task
from merging.errors import MergingError, NumericalError, Problem, TracingError
from merging.evaluation.drift import block_features
from merging.opened import Opened
from merging.preflight import config_problems
from merging.spec import PipelineSpec


def reload_check(
    folder: Path, stage: str, *, spec: PipelineSpec, opened: Opened, tasks: Mapping[str, Task], device: str
) -> None:
    """`folder` holds the whole checkpoint, `stage` names it. Raises MergingError for one that would not load,
    NumericalError for one that answers NaN or infinity.

    Always: headers whole, names and shapes the base's. Where a task has examples, and so models are run
    anyway: config and weights fit, the model class misses no parameter, and one example gives finite
    features after each block, held one block at a time."""
    base = opened.models.base
    try:
        source = _reopened(folder, stage, opened)
        problems = _misfits(source, base, _tied(opened) if is_adapter(folder) else _no_ties)
        example = _example(tasks)
        backbone = opened.models.backbone
        if not problems and example is not None and backbone is not None:
            problems = _config_misfits(folder, source, spec)
    except MergingError as error:
        if isinstance(error, NumericalError):
            raise
        raise _refused(stage, [Problem("", error.message, error.remedy), *error.problems]) from error
    if problems:
        raise _refused(stage, problems)
    if example is not None and backbone is not None:
        _refuse_not_finite(source, backbone, example, stage, device)


def _reopened(folder: Path, stage: str, opened: Opened) -> CheckpointSource:
    if not is_adapter(folder):
        return SafetensorsSource(folder, stage)
    tensors = SafetensorsSource(folder / WEIGHTS[0], stage)
    config = read_adapter_config(folder, stage)
    return LoraSource(opened.models.base, tensors, config, model=opened.outline(), label=stage)


def _no_ties(name: str) -> str | None:
    return None


def _tied(opened: Opened) -> Callable[[str], str | None]:
    """Name in the model -> the base's tensor that it shares, where one of its other names is stored."""
    outline = opened.outline()
    stored = {place: name for name, place in outline.places.items()}
    return lambda name: next((stored[one] for one in sorted(outline.tied(name)) if one in stored), None)


def _misfits(
    source: CheckpointSource, base: CheckpointSource, tied: Callable[[str], str | None]
) -> list[Problem]:
    """Names and shapes that are not the base's. An adapter has tied tensors under all their names: there they
    must be equal, or the model which is loaded from it would be untied."""
    ours, theirs = set(source.names()), set(base.names())
    problems = [Problem(name, "is missing") for name in sorted(theirs - ours)]
    for name in sorted(ours - theirs):
        twin = tied(name)
        if twin is None:
            problems.append(Problem(name, "is no tensor of the base"))
        elif not torch.equal(source.read(name), source.read(twin).to(source.spec(name).dtype)):
            problems.append(Problem(name, f'differs from "{twin}", to which the base ties it'))
    return problems + [
        Problem(name, f"is {tuple(source.spec(name).shape)}, the base has {tuple(base.spec(name).shape)}")
        for name in base.names()
        if name in ours and source.spec(name).shape != base.spec(name).shape
    ]


def _config_misfits(folder: Path, source: CheckpointSource, spec: PipelineSpec) -> list[Problem]:
    """What the class that the written config names would miss, or find in another shape."""
    backbone = None if is_adapter(folder) else select_backbone(folder, spec.backbone)
    if backbone is None:
        return []
    inside = backbone.module_names(source.names())
    walked = {name: place for name, place in inside.items() if not backbone.keeps(name)}
    return config_problems(backbone.skeleton(), walked, source)


def _example(tasks: Mapping[str, Task]) -> tuple[str, Batch] | None:
    """The first example that there is, and its task."""
    for name, task in tasks.items():
        given: Examples | None = task.calibration or task.test
        if given is not None and len(given):
            return name, {key: value[:1] for key, value in given.batches()[0].items()}
    return None


def _refuse_not_finite(
    source: CheckpointSource, backbone: Backbone, example: tuple[str, Batch], stage: str, device: str
) -> None:
    task, batch = example
    try:
        with torch.no_grad():
            for block, _, hidden_BTD in block_features(source, backbone, [batch], device=device):
                bad = int((~torch.isfinite(hidden_BTD)).sum())
                if bad:
                    raise NumericalError(
                        f'the {stage} model is not published: block "{block}" answers {bad} of '
                        f"{hidden_BTD.numel()} values that are NaN or infinite, on the first example of task "
                        f'"{task}"',
                        remedy="Use smaller weights or a smaller scale, or fewer experts; `merging compare` "
                        "shows how far each is from the base.",
                    )
    except TracingError:  # a model without blocks to walk: it was run by what its method needs, if at all
        return


def _refused(stage: str, problems: list[Problem]) -> MergingError:
    shown = problems[:10]
    if len(problems) > len(shown):
        shown.append(Problem("", f"and {len(problems) - len(shown)} more"))
    return MergingError(
        f"the {stage} model is not published: opened again, it would not load",
        problems=shown,
        remedy="This is a fault of the program or of a plug-in; nothing was left under the result's name.",
    )
