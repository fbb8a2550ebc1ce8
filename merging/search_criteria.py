"""What a point of a search is worth on each task. Test examples are never looked at.

Shape letters: B examples, N all examples of a task, F final feature.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor, nn

from merging.contracts.backbone import Backbone
from merging.contracts.models import Models
from merging.data.heads import refuse_misfit
from merging.data.task import Examples, Task
from merging.entropy_descent import entropy
from merging.errors import NumericalError
from merging.evaluation.evaluator import evaluate
from merging.evaluation.forward import all_features
from merging.evaluation.metric import Adapt, TaskScore
from merging.streaming import load_model


class Judge(ABC):
    """Judges models on fixed examples."""

    lower_is_better: ClassVar[bool] = True

    @abstractmethod
    def worth(self, model: nn.Module, adapt: Adapt) -> dict[str, float]:
        """Task -> a number. Raises NumericalError where there is none."""


class FeatureDistance(Judge):
    """Mean over examples of |f - f_expert| / |f_expert|, f the final feature that heads read."""

    def __init__(
        self, models: Models, backbone: Backbone, examples: Mapping[str, Examples], device: str
    ) -> None:
        self._backbone, self._examples = backbone, dict(examples)
        self._expert_NF: dict[str, Tensor] = {}
        for task in self._examples:  # one expert in memory at a time
            expert = load_model(backbone, models.experts[task], device=device)
            self._expert_NF[task] = _features(expert, backbone, self._examples[task])
            del expert

    def worth(self, model: nn.Module, adapt: Adapt) -> dict[str, float]:
        found = {}
        for task, expert_NF in self._expert_NF.items():
            ours_NF = adapt(_features(model, self._backbone, self._examples[task]), task)
            tiny = torch.finfo(torch.float32).tiny
            distance_N = (ours_NF - expert_NF).norm(dim=-1) / expert_NF.norm(dim=-1).clamp(min=tiny)
            found[task] = _finite(distance_N.double().mean().item(), task)
        return found


class Entropy(Judge):
    """Mean entropy of softmax(head(f))."""

    def __init__(
        self, backbone: Backbone, examples: Mapping[str, Examples], tasks: Mapping[str, Task]
    ) -> None:
        self._backbone, self._examples, self._tasks = backbone, dict(examples), tasks

    def worth(self, model: nn.Module, adapt: Adapt) -> dict[str, float]:
        found = {}
        for task, examples in self._examples.items():
            head = self._tasks[task].head
            assert head is not None
            features_NF = adapt(_features(model, self._backbone, examples), task)
            refuse_misfit(task, head, features_NF.shape[-1])
            found[task] = _finite(entropy(head(features_NF).double()).item(), task)
        return found


class ValidationScore(Judge):
    """The task's metric on its validation examples; a perplexity counts as its inverse, the geometric mean of
    the tokens' probabilities."""

    lower_is_better = False

    def __init__(self, backbone: Backbone, tasks: Mapping[str, Task]) -> None:
        self._backbone = backbone
        self._tasks = [
            Task(name, test=task.validation, head=task.head, metric=task.metric)
            for name, task in tasks.items()
        ]

    def worth(self, model: nn.Module, adapt: Adapt) -> dict[str, float]:
        scores = evaluate(model, self._backbone, self._tasks, adapt)
        return {task: _worth(score) for task, score in scores.items()}


def _worth(score: TaskScore) -> float:
    return 1 / score.value if score.lower_is_better else score.value


def _features(model: nn.Module, backbone: Backbone, examples: Examples) -> Tensor:
    return torch.cat(list(all_features(model, backbone, examples)))


def _finite(value: float, task: str) -> float:
    if not torch.isfinite(torch.tensor(value)):
        raise NumericalError(f'features on task "{task}" are NaN or infinite')
    return value
