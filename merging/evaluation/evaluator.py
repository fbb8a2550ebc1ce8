"""evaluate: how well a model does on each task, by the task's own metric."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from merging.allocator import reusing
from merging.contracts.backbone import Backbone
from merging.contracts.method import Progress, silent
from merging.data.task import Task
from merging.evaluation.metric import Adapt, TaskScore
from merging.evaluation.metrics import metric


@reusing()
def evaluate(
    model: nn.Module,
    backbone: Backbone,
    tasks: Sequence[Task],
    adapt: Adapt | None = None,
    progress: Progress = silent,
) -> dict[str, TaskScore]:
    """Task name -> score; tasks without what their metric needs are left out. Sets eval mode."""
    measured = [(task, metric(task.metric)) for task in tasks if is_scored(task)]
    total = sum(measure.steps(task) for task, measure in measured)
    done = 0

    def step() -> None:
        nonlocal done
        done += 1
        progress("evaluate", done, total)

    return {task.name: measure.score(model, backbone, task, adapt, step) for task, measure in measured}


def is_scored(task: Task) -> bool:
    """Whether the task has what its metric needs."""
    return metric(task.metric).measures(task)
