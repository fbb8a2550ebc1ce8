"""accuracy: the share of examples whose class is the head's highest score.

Shape letters: B examples, C classes, F final feature.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from merging.contracts.backbone import Backbone
from merging.data.heads import label_problems, refuse_misfit
from merging.data.task import Task
from merging.errors import DataError, NumericalError, Problem
from merging.evaluation.forward import all_features
from merging.evaluation.metric import Adapt, Metric, TaskScore


class Accuracy(Metric):
    """Features of the model through the task's head."""

    reads_head = True

    def measures(self, task: Task) -> bool:
        return task.test is not None and task.test.labels is not None and task.head is not None

    def problems(self, task: Task, backbone: Backbone | None) -> list[Problem]:
        return label_problems(task)

    def steps(self, task: Task) -> int:
        return len(task.test.batches()) if task.test is not None else 0

    def score(
        self, model: nn.Module, backbone: Backbone, task: Task, adapt: Adapt | None, step: Callable[[], None]
    ) -> TaskScore:
        test, head = task.test, task.head
        assert test is not None
        assert test.labels is not None
        assert head is not None
        if problems := label_problems(task):
            raise DataError("test labels and heads do not fit", problems=problems)
        predicted: list[Tensor] = []
        for features_BF in all_features(model, backbone, test):
            refuse_misfit(task.name, head, features_BF.shape[-1])
            if not bool(torch.isfinite(features_BF).all()):
                raise NumericalError(f'task "{task.name}": the model\'s features are NaN or infinite')
            scores_BC = head(features_BF if adapt is None else adapt(features_BF, task.name))
            predicted.append(scores_BC.argmax(-1))
            step()
        right = (torch.cat(predicted) == test.labels).double().mean().item()
        return TaskScore("accuracy", right, len(test))
