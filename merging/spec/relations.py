"""What sections of a spec must be to each other: tasks to experts, methods to data, weights to rules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from merging.data.spec import TaskSpec
from merging.file_names import too_long
from merging.layer_settings import changed
from merging.registry import did_you_mean
from merging.spec.component import Component, find_class
from merging.spec.findings import Findings
from merging.spec.own_folders import clashes
from merging.spec.paths import exists
from merging.spec.pipeline_spec import ExpertRef, ModelRef, OutputSpec
from merging.spec.wording import join, shortened


def check_relations(
    raw: Mapping[str, Any],
    base: ModelRef | None,
    experts: Mapping[str, ExpertRef | None],
    merge: Component | None,
    calibrate: Sequence[Component | None],
    tasks: Mapping[str, TaskSpec | None],
    output: OutputSpec | None,
    findings: Findings,
) -> None:
    """Add what does not fit together. A section that could not be read is None, and is not judged again."""
    calibrators = [component for component in calibrate if component is not None]
    _check_experts(raw, experts, merge, calibrators, findings)
    _check_task_names(experts, tasks, findings)
    _check_data(raw, experts, merge, calibrators, findings)
    _check_weights(experts, merge, findings)
    _check_output(base, experts, merge, tasks, output, findings)
    _check_order(raw, calibrate, findings)
    _check_metrics(calibrators, tasks, findings)
    _check_vocabulary(raw, merge, output, findings)


def _check_vocabulary(
    raw: Mapping[str, Any], merge: Component | None, output: OutputSpec | None, findings: Findings
) -> None:
    """What a vocabulary with tokens that the base lacks cannot be combined with."""
    if raw.get("vocabulary") != "union":
        return
    others = 'Use "base" or "backbone".'
    if output is not None and output.form == "lora":
        findings.add("vocabulary", '"union" adds rows, which an adapter on the base cannot hold', others)
    if merge is not None and merge.type == "checkpoint":
        what = '"union" takes new rows from experts, and this merge was made elsewhere'
        findings.add("vocabulary", what, others)


def _check_order(raw: Mapping[str, Any], calibrate: Sequence[Component | None], findings: Findings) -> None:
    """A calibrator that leaves a plug-in fits it to the weights of its own stage: nothing may change them
    after."""
    for number, component in enumerate(calibrate[:-1]):
        if component is None or not find_class("calibrators", component.type).changes_inference:
            continue
        where = f"calibrate[{number}]" if isinstance(raw.get("calibrate"), list) else "calibrate"
        what = f'"{component.type}" fits a plug-in to the features it finds, and another calibrator follows'
        findings.add(where, what, f'Put "{component.type}" last.')


def _check_metrics(
    calibrators: Sequence[Component], tasks: Mapping[str, TaskSpec | None], findings: Findings
) -> None:
    """A plug-in corrects the features that a head reads: a score without head would not see it."""
    plugins = [one.type for one in calibrators if find_class("calibrators", one.type).changes_inference]
    for name, task in tasks.items() if plugins else ():
        if task is not None and task.metric.type != "accuracy":
            what = f'"{task.metric.type}" reads no head, and "{plugins[0]}" corrects what a head reads'
            findings.add(join("tasks", name, "metric"), what, 'Use "accuracy" with a head.')


def _check_experts(
    raw: Mapping[str, Any],
    experts: Mapping[str, ExpertRef | None],
    merge: Component | None,
    calibrators: Sequence[Component],
    findings: Findings,
) -> None:
    if experts or not isinstance(raw.get("experts", {}), dict):
        return
    if merge is not None and merge.type == "checkpoint":
        if calibrators:
            what = f'missing: calibrator "{calibrators[0].type}" compares the merged model with the experts'
            findings.add("experts", what, "Name the experts that were merged.")
        return
    what = "there are none" if "experts" in raw else "missing"
    findings.add("experts", what, 'Like {"mnist": "models/mnist"}: task name -> a folder or hub id.')


def _check_task_names(
    experts: Mapping[str, ExpertRef | None], tasks: Mapping[str, TaskSpec | None], findings: Findings
) -> None:
    for name in tasks if experts else ():
        if name in experts:
            continue
        if name in TaskSpec.model_fields:
            expert = shortened(next(iter(experts)))
            remedy = f'Each task has its own: {{"tasks": {{"{expert}": {{"{name}": ...}}}}}}'
        else:
            remedy = did_you_mean(name, experts)
        findings.add(join("tasks", name), "there is no expert of this name", remedy)


def _check_data(
    raw: Mapping[str, Any],
    experts: Mapping[str, ExpertRef | None],
    merge: Component | None,
    calibrators: Sequence[Component],
    findings: Findings,
) -> None:
    methods = [("strategies", "strategy", merge)] if merge is not None else []
    methods += [("calibrators", "calibrator", component) for component in calibrators]
    needing = [
        f'{noun} "{component.type}"'
        for kind, noun, component in methods
        if "data" in find_class(kind, component.type).needs  # type: ignore[arg-type]
    ]
    tasks = raw.get("tasks") or {}
    if not needing or not isinstance(tasks, dict):
        return
    for name in experts:
        task = tasks.get(name)
        if name in tasks and not isinstance(task, dict):
            continue  # already said
        if not task or task.get("calibration") is None:
            verb = "needs" if len(needing) == 1 else "need"
            findings.add(
                join("tasks", name, "calibration"),
                f"missing: {' and '.join(needing)} {verb} some examples of every task",
                'Like {"type": "images", "path": "...", "examples": 256}.',
            )


def _check_weights(
    experts: Mapping[str, ExpertRef | None], merge: Component | None, findings: Findings
) -> None:
    weights = {name: ref.weight for name, ref in experts.items() if ref is not None}
    if merge is None or len(weights) < len(experts):
        return
    rule = find_class("strategies", merge.type)
    if not rule.weighted:
        for name, weight in weights.items():
            if weight != 1:
                what = f'found {weight:g}, but strategy "{merge.type}" does not weigh experts'
                findings.add(join("experts", name, "weight"), what, "Leave it out.")
        weights = dict.fromkeys(weights, 1.0)
    settings = {"merge": merge.settings}
    for number, entry in enumerate(merge.layers):
        if entry.changes:
            settings[f"merge.layers[{number}]"] = changed(merge.settings, entry.changes)
    told: set[str] = set()
    for where, one in settings.items() if weights else ():
        try:
            problems = rule.check(one, weights)
        except Exception as error:  # a plug-in's own code
            problems = [f'strategy "{merge.type}" failed to check them: {type(error).__name__}: {error}']
        for problem in problems:
            if problem not in told:
                findings.add(where, problem)
        told.update(problems)


def _check_output(
    base: ModelRef | None,
    experts: Mapping[str, ExpertRef | None],
    merge: Component | None,
    tasks: Mapping[str, TaskSpec | None],
    output: OutputSpec | None,
    findings: Findings,
) -> None:
    if output is None or output.path is None:
        return
    if unfit := too_long(output.path):
        findings.add("output.path", f"cannot be an output folder: {unfit}", "Choose another folder.")
        return
    for what in clashes(output.path, base, experts, merge, tasks):
        findings.add("output.path", what, "Choose another folder.")
    if exists(output.path) and output.path.is_file():
        findings.add("output.path", f'"{shortened(str(output.path))}" is a file, expected a folder')
