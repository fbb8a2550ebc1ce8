"""Scores and drift of base, experts, merged and calibrated model, on the same examples with the same
heads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from merging.checkpoints.source import CheckpointSource
from merging.contracts.method import Progress, silent
from merging.contracts.models import Models
from merging.data.hashing import overlap
from merging.data.task import Task
from merging.evaluation.drift import EXAMPLES, BlockDrift, drift
from merging.evaluation.evaluator import evaluate, is_scored
from merging.evaluation.metric import Adapt, TaskScore
from merging.report.drift import DriftReport
from merging.report.scores import TaskReport
from merging.streaming import load_model


@dataclass
class Measured:
    """Scores by kind of model ("base", "expert", "merged", "calibrated") and task; drift by task."""

    scores: dict[str, dict[str, TaskScore]] = field(default_factory=dict)
    drift: dict[str, dict[str, tuple[BlockDrift, ...]]] = field(default_factory=dict)

    def drift_report(self) -> DriftReport:
        return DriftReport.of(self.drift, examples=EXAMPLES) if self.drift else DriftReport()

    def task_reports(self, tasks: Mapping[str, Task]) -> dict[str, TaskReport]:
        return {
            name: self._report(task)
            for name, task in tasks.items()
            if task.test or task.calibration or is_scored(task)
        }

    def _report(self, task: Task) -> TaskReport:
        scores = {kind: scores[task.name] for kind, scores in self.scores.items() if task.name in scores}
        found = {kind: score.value for kind, score in scores.items()}
        splits = {"calibration": task.calibration, "test": task.test}
        both = task.calibration is not None and task.test is not None
        return TaskReport.of(
            metric=task.metric.type,
            lower_is_better=any(score.lower_is_better for score in scores.values()),
            test_examples=max((score.examples for score in scores.values()), default=len(task.test or ())),
            calibration_asked=task.calibration.asked if task.calibration is not None else None,
            calibration_used=len(task.calibration) if task.calibration is not None else 0,
            overlap=overlap(task.calibration, task.test) if both else 0,  # type: ignore[arg-type]
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
    adapt: Adapt | None = None,
    device: str = "cpu",
    progress: Progress = silent,
) -> Measured:
    """`results`: "merged" and maybe "calibrated"; `adapt` is applied to the features of the calibrated model.

    One expert is loaded at a time, beside the results.
    """
    backbone = models.backbone
    measured = Measured()
    scored = [task for task in tasks.values() if is_scored(task)]
    walked = [task for task in tasks.values() if task.test is not None or task.calibration is not None]
    with_expert = [task for task in tasks.values() if task in walked or task in scored]
    if backbone is None or not with_expert:
        return measured

    def score(kind: str, model: nn.Module, some: Sequence[Task], adapted: Adapt | None = None) -> None:
        def told(stage: str, done: int, total: int) -> None:
            progress(f"evaluate {kind}", done, total)

        if some:
            measured.scores.setdefault(kind, {}).update(evaluate(model, backbone, some, adapted, told))

    with torch.no_grad():
        if scored:
            score("base", load_model(backbone, models.base, device=device), scored)
        loaded = {name: load_model(backbone, source, device=device) for name, source in results.items()}
        for name, model in loaded.items():
            score(name, model, scored, adapt if name == "calibrated" else None)
        for number, task in enumerate(with_expert):
            if task.name not in models.experts:
                continue
            expert = load_model(backbone, models.experts[task.name], device=device)
            score("expert", expert, [task] if task in scored else [])
            examples = task.test if task.test is not None else task.calibration
            progress("measure drift", number, len(with_expert))
            if examples is not None:
                measured.drift[task.name] = drift(expert, loaded, backbone, examples.batches())
            progress("measure drift", number + 1, len(with_expert))
            del expert
    return measured
