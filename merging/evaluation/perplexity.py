"""perplexity: exp of the mean negative log-likelihood over all tokens of all examples.

Shape letters: R rows of a forward, T tokens, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from merging.contracts.backbone import Backbone, Batch
from merging.data.task import Task
from merging.data.text import TextExamples, padded
from merging.errors import NumericalError, Problem
from merging.evaluation.forward import output
from merging.evaluation.metric import Adapt, Metric, TaskScore, room_problems, text_problems, texts_of


class Perplexity(Metric):
    """Of the target given the prompt where there is a target, else of the prompt given its first token."""

    def measures(self, task: Task) -> bool:
        return task.test is not None

    def problems(self, task: Task, backbone: Backbone | None) -> list[Problem]:
        problems = text_problems(task, "perplexity", ("causal", "seq2seq"))
        for split, examples in (("test", task.test), ("validation", task.validation)):
            if not isinstance(examples, TextExamples) or examples.reader.kind == "encoder":
                continue
            where = f"tasks.{task.name}.{split}"
            if examples.reader.kind == "seq2seq" and not examples.targets:
                what = "an encoder-decoder's perplexity is that of a target, and there is none"
                problems.append(Problem(where, what, 'Like "target": "summary".'))
            elif not examples.targets and all(len(prompt.ids) < 2 for prompt in examples.prompts):
                problems.append(
                    Problem(where, "no text has a second token, and the first is never predicted")
                )
        return problems or room_problems(task, _read)

    def steps(self, task: Task) -> int:
        return len(texts_of(task).batches())

    def score(
        self, model: nn.Module, backbone: Backbone, task: Task, adapt: Adapt | None, step: Callable[[], None]
    ) -> TaskScore:
        test = texts_of(task)
        rows = _said(test) if test.reader.kind == "seq2seq" else _continued(test)
        loss, tokens = 0.0, 0
        for start in range(0, len(test), test.batch_size):
            batch, wanted_RT = rows(start, min(start + test.batch_size, len(test)))
            logits_RTV = output(model, backbone, batch).logits
            losses = nn.functional.cross_entropy(
                logits_RTV.flatten(0, 1).float(), wanted_RT.flatten().to(logits_RTV.device), reduction="none"
            )
            loss += losses.double().sum().item()
            tokens += int((wanted_RT != _IGNORED).sum())
            step()
        mean = loss / max(tokens, 1)
        if not math.isfinite(mean) or mean > _LARGEST:
            raise NumericalError(f'task "{task.name}": the perplexity is not finite')
        return TaskScore("perplexity", math.exp(mean), len(test), lower_is_better=True)


_IGNORED = -100  # cross_entropy's own mark of what is not counted
_LARGEST = 700.0  # beyond it exp is infinite in float64


def _read(examples: TextExamples) -> list[int]:
    """Tokens of its target that the model reads after each prompt (a decoder: its first token and all but the
    target's end)."""
    if not examples.targets:
        return [0] * len(examples)
    reader = examples.reader
    pairs = zip(examples.prompts, examples.targets, strict=True)
    return [len(reader.answer(prompt, target)) for prompt, target in pairs]


_Rows = Callable[[int, int], "tuple[Batch, Tensor]"]


def _continued(test: TextExamples) -> _Rows:
    """Texts of a causal model, and for each place the token that follows (R T); prompts do not count where
    there are targets."""

    def rows(start: int, stop: int) -> tuple[Batch, Tensor]:
        texts, first = [], []
        for number in range(start, stop):
            prompt = test.prompts[number]
            after = test.reader.answer(prompt, test.targets[number]) if test.targets else []
            texts.append([*prompt.ids, *after])
            first.append(len(prompt.ids) if test.targets else 1)
        return padded(texts, test.reader.pad), _following(texts, first)

    return rows


def _said(test: TextExamples) -> _Rows:
    """Prompts and targets of an encoder-decoder, and the target's tokens with the one that ends it."""

    def rows(start: int, stop: int) -> tuple[Batch, Tensor]:
        targets = [test.reader.target(target) for target in test.targets[start:stop]]
        begun = padded([[test.reader.start or 0, *ids[:-1]] for ids in targets], test.reader.pad)
        read = padded([prompt.ids for prompt in test.prompts[start:stop]], test.reader.pad)
        batch = {**read, **{f"decoder_{name}": value for name, value in begun.items()}}
        wanted_RT = _following([[0, *ids] for ids in targets], [1] * len(targets))
        return batch, wanted_RT[:, :-1]

    return rows


def _following(texts: Sequence[Sequence[int]], first: Sequence[int]) -> Tensor:
    """At each place the next token of the text (R T), from the text's `first` token to be counted on."""
    wanted_RT = torch.full((len(texts), max(map(len, texts))), _IGNORED)
    for row, (text, begin) in enumerate(zip(texts, first, strict=True)):
        wanted_RT[row, begin - 1 : len(text) - 1] = torch.tensor(text[begin:], dtype=torch.long)
    return wanted_RT
