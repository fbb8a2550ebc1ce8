"""Scores and drift of base, experts, merged and calibrated model, on the same examples with the same
heads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

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
    work: Path | None = None,
    progress: Progress = silent,
) -> Measured:
    """`results`: "merged" and maybe "calibrated"; `adapt` is applied to the features of the calibrated model.

    One model is loaded at a time to score it, a block at a time for its drift. `work`: where activations go
    that memory does not hold.
    """
    backbone = models.backbone
    measured = Measured()
    scored = [task for task in tasks.values() if is_scored(task)]
    walked = [task for task in tasks.values() if task.test is not None or task.calibration is not None]
    if backbone is None or not (walked or scored):
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
        for number, task in enumerate(walked):
            progress("measure drift", number, len(walked))
            examples = task.test if task.test is not None else task.calibration
            if examples is not None and task.name in models.experts:
                expert = models.experts[task.name]
                measured.drift[task.name] = drift(
                    expert, results, backbone, examples.batches(), device=device, work=work
                )
            progress("measure drift", number + 1, len(walked))
    return measured
