"""Scores and drift of base, experts, merged and calibrated model, on the same examples with the same
heads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from torch import nn

from merging.allocator import reusing
from merging.checkpoints.source import CheckpointSource
from merging.contracts.method import Progress, silent
from merging.contracts.models import Models
from merging.data.hashing import shared_examples
from merging.data.task import Task
from merging.evaluation.drift import EXAMPLES, ModelDrift, drift
from merging.evaluation.evaluator import evaluate, is_scored
from merging.evaluation.metric import Adapt, TaskScore
from merging.held_out import WORDS, HeldOut
from merging.report.drift import DriftReport
from merging.report.scores import TaskReport
from merging.stem import Tried
from merging.streaming import load_model


@dataclass
class Measured:
    """Scores by kind of model ("base", "expert", "merged", "calibrated") and task; drift by task."""

    scores: dict[str, dict[str, TaskScore]] = field(default_factory=dict)
    drift: dict[str, dict[str, ModelDrift]] = field(default_factory=dict)
    held: dict[str, HeldOut] = field(default_factory=dict)  # task -> what its drift was measured on
    drift_examples: int = EXAMPLES  # of each task, at most

    def drift_report(self) -> DriftReport:
        if not self.drift:
            return DriftReport()
        measured_on = {task: WORDS[one.origin] for task, one in self.held.items() if task in self.drift}
        return DriftReport.of(self.drift, examples=self.drift_examples, measured_on=measured_on)

    @property
    def notes(self) -> tuple[str, ...]:
        """What the report should warn of in the examples that drift was measured on."""
        return tuple(one.note for one in self.held.values() if one.note)

    def task_reports(self, tasks: Mapping[str, Task]) -> dict[str, TaskReport]:
        shared = shared_examples(tasks)
        return {
            name: self._report(task, shared[name].examples if name in shared else 0)
            for name, task in tasks.items()
            if task.test or task.calibration or is_scored(task)
        }

    def _report(self, task: Task, overlap: int) -> TaskReport:
        scores = {kind: scores[task.name] for kind, scores in self.scores.items() if task.name in scores}
        found = {kind: score.value for kind, score in scores.items()}
        splits = {"calibration": task.calibration, "test": task.test}
        return TaskReport.of(
            metric=task.metric.type,
            lower_is_better=any(score.lower_is_better for score in scores.values()),
            test_examples=max((score.examples for score in scores.values()), default=len(task.test or ())),
            calibration_asked=task.calibration.asked if task.calibration is not None else None,
            calibration_used=len(task.calibration) if task.calibration is not None else 0,
            overlap=overlap,
            fingerprints={
                split: examples.fingerprint for split, examples in splits.items() if examples is not None
            },
            **found,
        )


def measure(
    models: Models,
    results: Mapping[str, CheckpointSource],
    tasks: Mapping[str, Task],
    *,
    held: Mapping[str, HeldOut],
    adapt: Adapt | None = None,
    device: str = "cpu",
    work: Path | None = None,
    progress: Progress = silent,
) -> Measured:
    """`results`: "merged" and maybe "calibrated"; `adapt` is applied to the features of the calibrated model;
    `held`: what to measure drift on, task by task.

    One model is loaded at a time to score it, a block at a time for its drift. `work`: where activations go
    that memory does not hold.
    """
    backbone = models.backbone
    measured = Measured()
    scored = [task for task in tasks.values() if is_scored(task)]
    if backbone is None or not (held or scored):
        return measured

    def score(kind: str, model: nn.Module, some: Sequence[Task], adapted: Adapt | None = None) -> None:
        def told(stage: str, done: int, total: int) -> None:
            progress(f"evaluate {kind}", done, total)

        if some:
            measured.scores.setdefault(kind, {}).update(evaluate(model, backbone, some, adapted, told))

    with torch.no_grad():
        if scored:
            score("base", load_model(backbone, models.base, device=device), scored)
        for name, source in results.items():
            if scored:
                adapted = adapt if name == "calibrated" else None
                score(name, load_model(backbone, source, device=device), scored, adapted)
        for task in scored:
            if task.name in models.experts:
                score("expert", load_model(backbone, models.experts[task.name], device=device), [task])
    found = measure_drift(
        models, results, held, adapt=adapt, split=False, device=device, work=work, progress=progress
    )
    measured.drift, measured.held = found.drift, found.held
    return measured


@torch.no_grad()
@reusing()
def measure_drift(
    models: Models,
    results: Mapping[str, CheckpointSource],
    held: Mapping[str, HeldOut],
    *,
    adapt: Adapt | None = None,
    examples: int = EXAMPLES,
    split: bool = True,
    frechet: bool = False,
    device: str = "cpu",
    work: Path | None = None,
    progress: Progress = silent,
) -> Measured:
    """Drift alone. `split`: into local and upstream, too; `frechet`: the distance between distributions. One
    model's block at a time."""
    measured = Measured(drift_examples=examples)
    walked = {task: one for task, one in held.items() if task in models.experts}
    tried = Tried()
    if models.backbone is None:
        return measured
    for number, (task, one) in enumerate(walked.items()):
        progress("measure drift", number, len(walked))
        measured.held[task] = one
        measured.drift[task] = drift(
            models.experts[task],
            results,
            models.backbone,
            one.examples.batches(),
            examples=examples,
            adapt={} if adapt is None else {"calibrated": partial(_of_task, adapt, task)},
            split=split,
            frechet=frechet,
            device=device,
            work=work,
            tried=tried,
        )
        progress("measure drift", number + 1, len(walked))
    return measured


def _of_task(adapt: Adapt, task: str, features_BF: torch.Tensor) -> torch.Tensor:
    return adapt(features_BF, task)
