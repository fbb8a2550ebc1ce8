"""exact_match: the share of examples whose generated text is what was wanted."""

from __future__ import annotations

import string
from collections.abc import Callable, Sequence

import torch
from torch import nn

from merging.contracts.backbone import Backbone
from merging.data.task import Task
from merging.data.text import TextExamples, padded
from merging.errors import Problem
from merging.evaluation.forward import placed
from merging.evaluation.metric import Adapt, Metric, TaskScore, room_problems, text_problems, texts_of


class ExactMatch(Metric):
    """Generated greedily, cut at the first `stop`, compared as `normal` has it with the target or with any of
    the class's answers."""

    def measures(self, task: Task) -> bool:
        return task.test is not None

    def problems(self, task: Task, backbone: Backbone | None) -> list[Problem]:
        name = self.settings.type
        problems = text_problems(task, name, ("causal", "seq2seq"))
        for split, examples in (("test", task.test), ("validation", task.validation)):
            if isinstance(examples, TextExamples) and not examples.targets and not examples.answers:
                what = f'metric "{name}" compares with a text, and there is neither "target" nor "labels"'
                problems.append(Problem(f"tasks.{task.name}.{split}", what, 'Like "target": "summary".'))
        most = self.settings.max_new_tokens
        return problems or room_problems(
            task,
            lambda examples: [most if examples.reader.kind == "seq2seq" else most - 1] * len(examples),
        )

    def steps(self, task: Task) -> int:
        return len(texts_of(task).batches())

    def score(
        self, model: nn.Module, backbone: Backbone, task: Task, adapt: Adapt | None, step: Callable[[], None]
    ) -> TaskScore:
        test = texts_of(task)
        wanted = _wanted(test)
        right = 0
        for start in range(0, len(test), test.batch_size):
            prompts = [prompt.ids for prompt in test.prompts[start : start + test.batch_size]]
            said = generated(model, test, prompts, self.settings.max_new_tokens)
            for number, text in enumerate(said, start=start):
                right += normal(self._until_stop(text)) in wanted[number]
            step()
        return TaskScore(self.settings.type, right / len(test), len(test))

    def _until_stop(self, text: str) -> str:
        """The answer alone: a causal model may go on after it."""
        text = text.lstrip()
        for stop in getattr(self.settings, "stop", ("\n",)):
            text = text.partition(stop)[0]
        return text


def normal(text: str) -> str:
    """Without case, surrounding punctuation and differences of white space."""
    return " ".join(text.casefold().split()).strip(string.punctuation + " ")


@torch.no_grad()
def generated(
    model: nn.Module, examples: TextExamples, prompts: Sequence[Sequence[int]], most: int
) -> list[str]:
    """What the model says after each prompt, taking the likeliest token each time."""
    from transformers import GenerationConfig

    reader = examples.reader
    model.eval()
    batch = padded(prompts, reader.pad, left=reader.kind == "causal")
    how = GenerationConfig(
        max_new_tokens=most,
        do_sample=False,
        num_beams=1,
        eos_token_id=reader.end,
        pad_token_id=reader.pad,
        decoder_start_token_id=reader.start,
    )
    ids_RT = model.generate(**placed(batch, model), generation_config=how)  # type: ignore[operator]
    first = batch["input_ids"].shape[1] if reader.kind == "causal" else 1
    return [reader.text(row[first:]) for row in ids_RT.tolist()]


def _wanted(test: TextExamples) -> list[set[str]]:
    """For each example the texts that are right."""
    if test.targets:
        return [{normal(target)} for target in test.targets]
    assert test.labels is not None
    return [{normal(answer) for answer in test.answers[label]} for label in test.labels.tolist()]
