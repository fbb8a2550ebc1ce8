"""choice: the share of examples whose class has the likeliest answer."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from torch import nn

from merging.contracts.backbone import Backbone
from merging.data.task import Task
from merging.data.text import TextExamples
from merging.errors import NumericalError, Problem
from merging.evaluation.likelihood import log_likelihoods
from merging.evaluation.metric import Adapt, Metric, TaskScore, room_problems, text_problems, texts_of


class Choice(Metric):
    """A class is as likely as the likeliest of its answers; of classes that are equally likely the first
    counts."""

    def measures(self, task: Task) -> bool:
        return task.test is not None

    def problems(self, task: Task, backbone: Backbone | None) -> list[Problem]:
        problems = text_problems(task, self.settings.type, ("causal", "seq2seq"))
        for split, examples in (("test", task.test), ("validation", task.validation)):
            if isinstance(examples, TextExamples) and examples.reader.kind != "encoder":
                problems += _answer_problems(examples, f"tasks.{task.name}.{split}", self.settings.type)
        return problems or room_problems(task, _read)

    def steps(self, task: Task) -> int:
        return len(texts_of(task).batches())

    def score(
        self, model: nn.Module, backbone: Backbone, task: Task, adapt: Adapt | None, step: Callable[[], None]
    ) -> TaskScore:
        test = texts_of(task)
        assert test.labels is not None
        classes = [label for label, answers in enumerate(test.answers) for _ in answers]
        texts = [answer for answers in test.answers for answer in answers]
        right = 0
        for start in range(0, len(test), test.batch_size):
            prompts = [prompt.ids for prompt in test.prompts[start : start + test.batch_size]]
            answers = test.answer_ids[start : start + test.batch_size]
            found = log_likelihoods(model, backbone, test.reader, prompts, answers, test.batch_size)
            for number, (row, ids) in enumerate(zip(found, answers, strict=True), start=start):
                if not all(map(math.isfinite, row)):
                    raise NumericalError(f'task "{task.name}": likelihoods are NaN or infinite')
                worth = [self._worth(*one) for one in zip(row, ids, texts, strict=True)]
                best = max(range(len(worth)), key=worth.__getitem__)
                right += classes[best] == int(test.labels[number])
            step()
        return TaskScore(self.settings.type, right / len(test), len(test))

    def _worth(self, likelihood: float, ids: Sequence[int], text: str) -> float:
        how = getattr(self.settings, "normalise", "none")
        return likelihood / {"none": 1, "tokens": len(ids), "characters": len(text)}[how]


def _read(examples: TextExamples) -> list[int]:
    """Tokens of its longest answer that the model reads after each prompt: an answer's last is never read."""
    reader, prompt = examples.reader, examples.prompts[0]
    longest = max(len(reader.answer(prompt, text)) for texts in examples.answers for text in texts)
    return [longest if reader.kind == "seq2seq" else longest - 1] * len(examples)


def _answer_problems(examples: TextExamples, where: str, metric: str) -> list[Problem]:
    """Classes without answers, and answers that are no tokens or the same tokens as another's."""
    if not examples.answers:
        remedy = 'Like "label": "label", "labels": {"neg": " negative", "pos": " positive"}.'
        return [Problem(where, f'metric "{metric}" compares answers, and there are no "labels"', remedy)]
    prompt = examples.prompts[0]
    seen: dict[tuple[int, ...], str] = {}
    problems = []
    for texts in examples.answers:
        for text in texts:
            ids = tuple(examples.reader.answer(prompt, text))
            if not ids:
                problems.append(Problem(f"{where}.labels", f'the answer "{text}" has no tokens'))
            elif ids in seen:
                what = f'the answers "{seen[ids]}" and "{text}" are the same tokens'
                problems.append(Problem(f"{where}.labels", what, "The tokenizer may not know their words."))
            seen.setdefault(ids, text)
    return problems
