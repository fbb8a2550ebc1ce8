"""evaluate: how well a model does on each task's test examples.

Shape letters: B examples, C classes, F final feature.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor, nn

from merging.contracts.backbone import Backbone
from merging.contracts.method import Progress, silent
from merging.data.heads import label_problems, refuse_misfit
from merging.data.task import Examples, LinearHead, Task
from merging.errors import DataError, NumericalError
from merging.evaluation.forward import all_features
from merging.evaluation.metrics import metric

Adapt: TypeAlias = Callable[[Tensor, str], Tensor]
"""Features (B F) and the task's name -> the features its head shall read; see `Calibrator.adapt`."""


@dataclass(frozen=True)
class TaskScore:
    """One number, and on how many examples it rests."""

    metric: str
    value: float
    examples: int


def evaluate(
    model: nn.Module,
    backbone: Backbone,
    tasks: Sequence[Task],
    adapt: Adapt | None = None,
    progress: Progress = silent,
) -> dict[str, TaskScore]:
    """Task name -> score; tasks without labelled test examples or head are left out. Sets eval mode."""
    problems = [problem for task in tasks for problem in label_problems(task)]
    if problems:
        raise DataError("test labels and heads do not fit", problems=problems)
    done, total, scores = 0, sum(len(task.test.batches()) for task in tasks if task.test is not None), {}
    for task in tasks:
        if task.test is None or task.test.labels is None or task.head is None:
            continue
        measure, predicted = metric(task.metric), []
        for classes_B in _predictions(model, backbone, task.name, task.test, task.head, adapt):
            predicted.append(classes_B)
            done += 1
            progress("evaluate", done, total)
        value = measure(torch.cat(predicted), task.test.labels)
        scores[task.name] = TaskScore(task.metric, value, len(task.test))
    return scores


def _predictions(
    model: nn.Module, backbone: Backbone, task: str, test: Examples, head: LinearHead, adapt: Adapt | None
) -> Iterator[Tensor]:
    """The class with the highest score (B), batch by batch."""
    for features_BF in all_features(model, backbone, test):
        refuse_misfit(task, head, features_BF.shape[-1])
        if not bool(torch.isfinite(features_BF).all()):
            raise NumericalError(f'task "{task}": the model\'s features are NaN or infinite')
        scores_BC = head(features_BF if adapt is None else adapt(features_BF, task))
        yield scores_BC.argmax(-1)
