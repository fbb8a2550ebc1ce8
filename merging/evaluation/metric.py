"""Metric: what is measured on a task, whatever it needs for that."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from merging.errors import Problem

if TYPE_CHECKING:
    from torch import Tensor, nn

    from merging.contracts.backbone import Backbone
    from merging.data.task import Task
    from merging.data.text import TextExamples

Adapt: TypeAlias = "Callable[[Tensor, str], Tensor]"
"""Features (B F) and the task's name -> the features its head shall read; see `Calibrator.adapt`."""


@dataclass(frozen=True)
class TaskScore:
    """One number, and on how many examples it rests."""

    metric: str
    value: float
    examples: int
    lower_is_better: bool = False


class Metric(ABC):
    """Made from its settings; has no state of a model."""

    reads_head = False  # whether it is the task's head that answers
    reads_examples = True  # whether it measures on the task's examples

    def __init__(self, settings: Any) -> None:
        self.settings = settings

    @abstractmethod
    def measures(self, task: Task) -> bool:
        """Whether the task has what there is to measure on."""

    @abstractmethod
    def problems(self, task: Task, backbone: Backbone | None) -> list[Problem]:
        """What a task that is to be measured lacks; known before any weight is read."""

    @abstractmethod
    def steps(self, task: Task) -> int:
        """How often `score` calls `step`."""

    @abstractmethod
    def score(
        self, model: nn.Module, backbone: Backbone, task: Task, adapt: Adapt | None, step: Callable[[], None]
    ) -> TaskScore:
        """Measure; `step` after each batch. Raises NumericalError where there is no number."""


def text_problems(task: Task, metric: str, kinds: tuple[str, ...]) -> list[Problem]:
    """What keeps a metric from working on the task's texts, whatever they are."""
    from merging.data.text import TextExamples

    problems = []
    for split, examples in (("test", task.test), ("validation", task.validation)):
        if examples is None:
            continue
        where = f"tasks.{task.name}.{split}"
        if not isinstance(examples, TextExamples):
            remedy = 'Give a "text" or "dataset" source.'
            problems.append(Problem(where, f'metric "{metric}" reads texts, and this is no text', remedy))
        elif examples.reader.kind not in kinds or not examples.reader.writes:
            what = f'metric "{metric}" needs a model that writes text, and the base only reads it'
            problems.append(Problem(where, what, 'Use metric "accuracy" with a head.'))
    return problems


def room_problems(task: Task, answer_tokens: Callable[[TextExamples], Sequence[int]]) -> list[Problem]:
    """Prompts that leave the base no positions for their answers. `answer_tokens`: how many tokens of its
    answer the model reads after each prompt, the token that starts a decoder among them."""
    from merging.data.text import TextExamples

    problems = []
    for split, examples in (("test", task.test), ("validation", task.validation)):
        if not isinstance(examples, TextExamples) or not examples.reader.writes:
            continue
        most = examples.reader.positions
        if most is None:
            continue
        apart = examples.reader.kind == "seq2seq"  # a decoder's positions are its own
        longest, prompt, answer = max(
            (read + (0 if apart else len(prompt.ids)), len(prompt.ids), read)
            for prompt, read in zip(examples.prompts, answer_tokens(examples), strict=True)
        )
        if longest <= most:
            continue
        what = f"an answer needs {answer} positions after a prompt of {prompt} tokens, the base has {most}"
        room = f'"max_length": {most - answer} or less.' if answer < most and not apart else ""
        problems.append(Problem(f"tasks.{task.name}.{split}", what, room or "Shorten the answers."))
    return problems


def texts_of(task: Task) -> TextExamples:
    """The task's test examples, which `text_problems` found to be texts."""
    from merging.data.text import TextExamples

    assert isinstance(task.test, TextExamples)
    return task.test
