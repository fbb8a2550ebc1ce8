"""merge: one call from tensors, modules or folders to a merged state dict."""

from __future__ import annotations

import os
from collections.abc import Mapping
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from torch import Tensor, nn

from merging.arguments import NAME, SEED, Check, checked, found, is_place, kind, mapping_of, optional
from merging.checkpoints.number_kinds import is_whole, refuse_complex, tensors_source
from merging.checkpoints.sink import StateDictSink
from merging.checkpoints.source import CheckpointSource, RenamedSource, StateDictSource
from merging.components import strategies
from merging.contracts.models import Models
from merging.data.task import CalibrationData, Examples
from merging.errors import CheckpointError, DataError, Problem, SpecError
from merging.layer_settings import LayerSettings
from merging.registry import did_you_mean
from merging.settings import LARGEST_WEIGHT
from merging.spec.component import Component, read_component
from merging.spec.findings import Findings
from merging.strategies.checkpoint import Checkpoint
from merging.vocabulary_comparison import differing

if TYPE_CHECKING:
    from merging.contracts.backbone import Backbone
    from merging.data.task import Head

Model: TypeAlias = "Mapping[str, Tensor] | nn.Module | str | os.PathLike[str] | CheckpointSource"


_MODEL = kind(
    "a mapping of tensors, a module or a folder",
    lambda value: isinstance(value, CheckpointSource | Mapping | nn.Module) or is_place(value),
)
_BY_EXPERT = "a mapping by the experts' names"


def _is_backbone(value: object) -> bool:
    from merging.contracts.backbone import Backbone

    return isinstance(value, Backbone)


_CHECKS: dict[str, Check] = {
    "name": NAME,
    "base": _MODEL,
    "experts": mapping_of("a mapping of names to models", '{"math": "models/math"}', _MODEL),
    "weights": optional(mapping_of(_BY_EXPERT, '{"math": 0.5}')),
    "data": optional(
        mapping_of(_BY_EXPERT, '{"math": examples}', kind("examples", lambda one: isinstance(one, Examples)))
    ),
    "heads": optional(mapping_of(_BY_EXPERT, '{"math": head}', kind("a function of features", callable))),
    "backbone": optional(
        kind("a Backbone", _is_backbone, "Pipeline.from_spec(spec).resolve().models.backbone is one.")
    ),
    "seed": SEED,
}


@checked(**_CHECKS)
def merge(
    name: str,
    base: Model,
    experts: Mapping[str, Model],
    *,
    weights: Mapping[str, float] | None = None,
    data: Mapping[str, Examples] | None = None,
    heads: Mapping[str, Head] | None = None,
    backbone: Backbone | None = None,
    seed: int = 0,
    **settings: Any,
) -> dict[str, Tensor]:
    """The merged model as a new state dict, with the base's names, shapes and dtypes.

    `base` and each expert: a mapping of tensors, a module or a folder (of an adapter, too). `weights`: by
    expert, else 1. `data`: calibration examples by expert, and `backbone`, for rules that look at
    activations; `heads` by expert (features -> scores of classes), for rules that look at predictions.

    >>> merged = merge("ties", base, {"math": math, "code": code}, density=0.3)
    """
    rule = strategies.get(name)
    component = _component(name, settings)
    given, layers = component.settings, LayerSettings(component.layers)
    opened_base = _opened(base, "base")
    opened = {
        task: _adapted(expert, base, opened_base, backbone, f'expert "{task}"')
        or _opened(expert, f'expert "{task}"')
        for task, expert in experts.items()
    }
    if not opened and not issubclass(rule, Checkpoint):
        raise SpecError("there are no experts to merge")
    _refuse_other_vocabularies(base, experts)
    aliases = _aliases(opened_base, opened)
    models = Models(
        _without(opened_base, aliases),
        {task: _without(expert, aliases) for task, expert in opened.items()},
        _weights(weights or {}, opened),
        backbone,
    )
    problems = layers.problems(models, given, where="")
    models = layers.applied(models)
    refuse_misfits(models)
    refuse_complex(models)
    problems += [Problem("settings", problem) for problem in rule.check(given, models.weights)]
    if problems:
        raise SpecError(f'strategy "{name}" cannot merge these experts', problems=problems)
    if "data" in rule.needs and data is None:
        raise DataError(
            f'strategy "{name}" needs calibration examples', remedy="Give them as data={expert: ...}."
        )
    calibration = CalibrationData(data, heads) if data is not None else None
    if calibration is not None and "data" in rule.needs:
        calibration.require(models.tasks, heads="heads" in rule.needs)
    merger = rule(given, seed=int(seed))
    merger.layers = layers
    if isinstance(merger, Checkpoint):
        merger.source = _opened(merger.settings.model, f'"{merger.settings.model}"')
    sink = StateDictSink(models.base)
    with sink:
        merger.merge(models, calibration, sink)
    merged = sink.tensors
    return {tensor: merged[aliases.get(tensor, tensor)] for tensor in opened_base.names()}


def _refuse_other_vocabularies(base: Model, experts: Mapping[str, Model]) -> None:
    """Rows of two folders are compared by index here, which must mean the same tokens."""
    if not isinstance(base, str | os.PathLike):
        return
    folders = {
        f'expert "{task}"': Path(one) for task, one in experts.items() if isinstance(one, str | os.PathLike)
    }
    if problems := differing(Path(base), folders):
        raise CheckpointError(
            "the experts' tokens are not the base's",
            problems=problems,
            remedy='Use a pipeline, whose "vocabulary" says what shall be done.',
        )


def refuse_misfits(models: Models) -> None:
    """Raise a CheckpointError that lists every missing, extra or unfit tensor of every expert."""
    problems = [problem for expert in models.experts.values() for problem in _misfits(models, expert)]
    if problems:
        tensors = "1 tensor does" if len(problems) == 1 else f"{len(problems)} tensors do"
        raise CheckpointError(f"{tensors} not fit the base", problems=problems)


def _misfits(models: Models, expert: CheckpointSource) -> list[Problem]:
    base = models.base
    problems = []
    present = set(expert.names())
    wanted = [name for name in base.names() if name not in models.kept]
    for name in wanted:
        spec = base.spec(name)
        if is_whole(spec.dtype):
            continue  # the base's own is kept, whatever the expert has
        where = f"{expert.label}: {name}"
        if name not in present:
            problems.append(Problem(where, f"missing; the base has shape {spec.shape}"))
        elif expert.spec(name).shape != spec.shape:
            problems.append(Problem(where, f"shape {expert.spec(name).shape}, the base has {spec.shape}"))
        elif expert.spec(name).dtype.is_floating_point != spec.dtype.is_floating_point:
            problems.append(
                Problem(where, f"{expert.spec(name).dtype}, which cannot be merged with {spec.dtype}")
            )
    extra = [name for name in expert.names() if name not in set(base.names()) and name not in models.kept]
    for name in extra:
        if not is_whole(expert.spec(name).dtype):
            problems.append(Problem(f"{expert.label}: {name}", "not in the base"))
    return problems


def _component(name: str, values: Mapping[str, Any]) -> Component:
    findings = Findings()
    if "type" in values:
        findings.add("type", "there is no such setting", "The first argument names the rule.")
        raise SpecError(f'settings of strategy "{name}"', problems=findings.problems())
    plain = {
        key: os.fspath(value) if isinstance(value, os.PathLike) else value for key, value in values.items()
    }
    component = read_component("strategies", {"type": name, **plain}, "", findings)
    if component is None:
        raise SpecError(f'settings of strategy "{name}"', problems=findings.problems())
    return component


def _opened(model: Model, label: str) -> CheckpointSource:
    if isinstance(model, CheckpointSource):
        return model
    if isinstance(model, Mapping | nn.Module):
        return tensors_source(model, label)
    if isinstance(model, str | os.PathLike):
        from merging.checkpoints.folder import open_checkpoint

        return open_checkpoint(Path(model), label=label)
    raise SpecError(f"{label}: found {found(model)}, expected a mapping of tensors, a module or a folder")


def _adapted(
    expert: Model, base: Model, opened: CheckpointSource, backbone: Backbone | None, label: str
) -> CheckpointSource | None:
    """The base with the adapter, where the expert is the folder of one."""
    from merging.checkpoints.lora import is_adapter, open_adapter
    from merging.inspection import open_model

    if not isinstance(expert, str | os.PathLike) or not is_adapter(Path(expert)):
        return None
    if backbone is not None:
        outline: nn.Module | None = backbone.skeleton()
    elif isinstance(base, nn.Module):
        outline = base
    else:
        outline = open_model(os.fspath(base)).module if isinstance(base, str | os.PathLike) else None
    return open_adapter(Path(expert), opened, outline, label)


def _weights(given: Mapping[str, float], experts: Mapping[str, object]) -> dict[str, float]:
    problems = [
        Problem(f"weights.{task}", "no such expert", did_you_mean(task, experts))
        for task in given
        if task not in experts
    ]
    problems += [
        Problem(f"weights.{task}", f"found {found(weight)}, expected a finite number, of at most 1e12")
        for task, weight in given.items()
        if not _is_weight(weight)
    ]
    if problems:
        raise SpecError("the weights do not fit the experts", problems=problems)
    return {task: float(given.get(task, 1.0)) for task in experts}


def _is_weight(value: object) -> bool:
    if not isinstance(value, Real) or isinstance(value, bool):
        return False
    try:
        return abs(float(value)) <= LARGEST_WEIGHT
    except OverflowError:
        return False


def _aliases(base: CheckpointSource, experts: Mapping[str, CheckpointSource]) -> dict[str, str]:
    """Second names of tensors that base and experts alike hold under two names (tied weights) -> the first.

    They are merged once, so that whole-model quantities do not count them twice.
    """
    sources = [base, *experts.values()]
    if not all(isinstance(source, StateDictSource) for source in sources):
        return {}
    aliases: dict[str, str] = {}
    first: dict[tuple[object, ...], str] = {}
    for name in base.names():
        if any(name not in source.names() for source in sources) or not base.spec(name).elements:
            continue
        tensors = [source.read(name) for source in sources]
        place = tuple((tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype) for tensor in tensors)
        if place in first:
            aliases[name] = first[place]
        else:
            first[place] = name
    return aliases


def _without(source: CheckpointSource, aliases: Mapping[str, str]) -> CheckpointSource:
    if not aliases:
        return source
    return RenamedSource(source, {name: name for name in source.names() if name not in aliases})
