"""Answers compared by likelihood, against a plain reading of the definition, one answer at a time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_texts import KINDS, Workshop

from merging.evaluation.evaluator import evaluate
from merging.evaluation.likelihood import log_likelihoods
from merging.evaluation.metric_spec import ChoiceSpec, Seq2SeqSpec
from merging.evaluation.metrics import metric

ANSWERS = {"neg": " neg", "pos": " pos"}


@pytest.fixture(params=KINDS)
def workshop(request: pytest.FixtureRequest, tmp_path: Path) -> Workshop:
    return Workshop(tmp_path, request.param)


@pytest.mark.parametrize(
    "labels",
    [
        ANSWERS,
        {"neg": " neg", "pos": " quite good film"},
        {"neg": (" bad", " very bad"), "pos": " very good"},
    ],
    ids=["one token", "unequal", "several"],
)
def test_the_likeliest_answer_is_chosen(workshop: Workshop, labels: dict[str, Any]) -> None:
    task = workshop.task(ChoiceSpec(), label="label", labels=labels)

    score = evaluate(workshop.model, workshop.backbone, [task])["movie"]

    right = 0
    for prompt, label in zip(task.test.prompts, task.test.labels.tolist(), strict=True):
        worth = [
            max(
                workshop.log_likelihood(prompt.text, one)
                for one in ((answer,) if isinstance(answer, str) else answer)
            )
            for answer in labels.values()
        ]
        right += worth.index(max(worth)) == label
    assert (score.metric, score.value, score.examples) == ("choice", right / 9, 9)


def test_batched_likelihoods_are_those_of_one_at_a_time(workshop: Workshop) -> None:
    task = workshop.task(ChoiceSpec(), label="label", labels=ANSWERS)
    reader, prompts = task.test.reader, task.test.prompts
    texts = (" neg", " very good", " very bad", " quite a fine film")
    answers = [[reader.answer(prompt, text) for text in texts] for prompt in prompts]

    found = log_likelihoods(
        workshop.model, workshop.backbone, reader, [prompt.ids for prompt in prompts], answers, rows=5
    )

    expected = [[workshop.log_likelihood(prompt.text, text) for text in texts] for prompt in prompts]
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=1e-5, atol=1e-5)


def test_answers_of_one_token_share_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    workshop = Workshop(tmp_path, "llama")
    task = workshop.task(ChoiceSpec(), label="label", labels=ANSWERS)
    rows: list[int] = []
    forward = workshop.model.forward
    monkeypatch.setattr(
        workshop.model,
        "forward",
        lambda input_ids, **rest: (rows.append(len(input_ids)), forward(input_ids, **rest))[1],
    )

    evaluate(workshop.model, workshop.backbone, [task])

    assert rows == [4, 4, 1]


@pytest.mark.parametrize("normalise", ["tokens", "characters"])
def test_length_may_be_taken_out(tmp_path: Path, normalise: Any) -> None:
    workshop = Workshop(tmp_path, "llama")
    labels = {"neg": " neg", "pos": " quite a good film"}
    task = workshop.task(ChoiceSpec(normalise=normalise), label="label", labels=labels)
    length = (
        {" neg": 1, " quite a good film": 4}
        if normalise == "tokens"
        else {text: len(text) for text in labels.values()}
    )

    score = evaluate(workshop.model, workshop.backbone, [task])["movie"]

    right = 0
    for prompt, label in zip(task.test.prompts, task.test.labels.tolist(), strict=True):
        worth = [workshop.log_likelihood(prompt.text, text) / length[text] for text in labels.values()]
        right += worth.index(max(worth)) == label
    assert score.value == right / 9


def test_seq2seq_by_likelihood_is_choice(workshop: Workshop) -> None:
    keys: dict[str, Any] = {"label": "label", "labels": ANSWERS}

    one = evaluate(workshop.model, workshop.backbone, [workshop.task(ChoiceSpec(), **keys)])["movie"]
    other = evaluate(workshop.model, workshop.backbone, [workshop.task(Seq2SeqSpec(), **keys)])["movie"]

    assert other.value == one.value
    assert other.metric == "seq2seq"


def test_what_a_choice_lacks_is_known_beforehand(tmp_path: Path) -> None:
    workshop = Workshop(tmp_path, "llama")
    cases = {
        'no "labels"': {"label": "label"},
        "are the same tokens": {"label": "label", "labels": {"neg": " neg", "pos": "neg"}},
        "has no tokens": {"label": "label", "labels": {"neg": " ", "pos": " pos"}},
    }

    for message, keys in cases.items():
        task = workshop.task(ChoiceSpec(), **keys)
        problems = metric(task.metric).problems(task, workshop.backbone)
        assert any(message in problem.what for problem in problems), message
