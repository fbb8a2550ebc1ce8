"""exact_match and perplexity, against plain readings of their definitions, one example at a time."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_texts import KINDS, Workshop, sentences

from merging.evaluation.evaluator import evaluate
from merging.evaluation.exact_match import normal
from merging.evaluation.metric_spec import ChoiceSpec, ExactMatchSpec, PerplexitySpec, Seq2SeqSpec
from merging.evaluation.metrics import metric


@pytest.fixture(params=KINDS)
def workshop(request: pytest.FixtureRequest, tmp_path: Path) -> Workshop:
    return Workshop(tmp_path, request.param)


def greedy(workshop: Workshop, prompt: str, most: int) -> str:
    """The likeliest token each time, without padding or caches."""
    read = torch.tensor([workshop.tokenizer(prompt)["input_ids"]])
    said: list[int] = []
    with torch.no_grad():
        while len(said) < most and (not said or said[-1] != 2):
            if workshop.name == "t5":
                logits = workshop.model(input_ids=read, decoder_input_ids=torch.tensor([[0, *said]])).logits
            else:
                logits = workshop.model(
                    torch.cat([read, torch.tensor([said], dtype=torch.long)], dim=1)
                ).logits
            said.append(int(logits[0, -1].argmax()))
    text: str = workshop.tokenizer.decode(said, skip_special_tokens=True)
    return text


def test_what_the_model_says_itself_is_an_exact_match(workshop: Workshop) -> None:
    rows = sentences(9)
    for number, row in enumerate(rows):
        own = greedy(workshop, f"{row['text']}\nAnswer:", 5)
        row["said"] = f"  {own.upper()}. " if number % 3 else "something else"
    task = workshop.task(ExactMatchSpec(max_new_tokens=5), rows, target="said")

    score = evaluate(workshop.model, workshop.backbone, [task])["movie"]

    assert (score.metric, score.value, score.examples) == ("exact_match", pytest.approx(6 / 9), 9)


def test_any_answer_of_the_class_will_do(workshop: Workshop) -> None:
    rows = sentences(4)
    said = [greedy(workshop, f"{row['text']}\nAnswer:", 3) for row in rows]
    for number, row in enumerate(rows):
        row["label"] = "a" if number < 2 else "b"
    labels = {"a": tuple(said[:2]), "b": ("nothing", "of that")}
    task = workshop.task(Seq2SeqSpec(by="generation", max_new_tokens=3), rows, label="label", labels=labels)

    score = evaluate(workshop.model, workshop.backbone, [task])["movie"]

    assert (score.metric, score.value) == ("seq2seq", 0.5)


def test_texts_are_compared_without_case_space_and_punctuation() -> None:
    assert normal("  The  Answer\tis: YES!") == normal("the answer is: yes")
    assert normal("yes") != normal("yes sir")


@pytest.mark.parametrize("said", [True, False])
def test_perplexity_is_weighted_by_tokens(workshop: Workshop, said: bool) -> None:
    rows = [{**row, "said": " ".join(row["text"].split()[:3])} for row in sentences(9)]
    task = workshop.task(PerplexitySpec(), rows, **({"target": "said"} if said else {}))
    if workshop.name == "t5" and not said:
        (problem,) = metric(task.metric).problems(task, workshop.backbone)
        assert "there is none" in problem.what
        return

    score = evaluate(workshop.model, workshop.backbone, [task])["movie"]

    loss, tokens = 0.0, 0
    for row in rows:
        prompt = f"{row['text']}\nAnswer:"
        if said:
            loss -= workshop.log_likelihood(prompt, row["said"])
            tokens += len(row["said"].split()) + (workshop.name == "t5")
        else:
            ids = torch.tensor([workshop.tokenizer(prompt)["input_ids"]])
            with torch.no_grad():
                logits = workshop.model(ids).logits[0, :-1]
            loss += torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="sum").item()
            tokens += ids.shape[1] - 1
    assert score.lower_is_better
    assert score.value == pytest.approx(math.exp(loss / tokens), rel=1e-5)


def test_a_model_without_its_language_head_writes_no_text(tmp_path: Path) -> None:
    workshop = Workshop(tmp_path, "t5")
    config = json.loads((tmp_path / "base" / "config.json").read_text())
    (tmp_path / "base" / "config.json").write_text(json.dumps({**config, "architectures": ["T5Model"]}))

    task = workshop.task(ExactMatchSpec(), label="label", labels={"neg": "neg", "pos": "pos"})

    (problem,) = metric(task.metric).problems(task, workshop.backbone)
    assert "needs a model that writes text" in problem.what


@pytest.mark.parametrize(
    ("spec", "keys", "remedy"),
    [
        (ChoiceSpec(), {"label": "label", "labels": {"neg": " neg", "pos": " pos film"}}, 63),
        (ExactMatchSpec(max_new_tokens=5), {"target": "said"}, 60),
        (PerplexitySpec(), {"target": "said"}, 62),
    ],
    ids=["choice", "exact_match", "perplexity"],
)
def test_an_answer_beyond_the_models_positions_is_known_beforehand(
    tmp_path: Path, spec: Any, keys: dict[str, Any], remedy: int
) -> None:
    workshop = Workshop(tmp_path, "llama")
    rows = [{"text": 80 * "film ", "label": label, "said": " good film"} for label in ("neg", "pos")]

    (problem,) = metric(spec).problems(workshop.task(spec, rows, **keys), workshop.backbone)
    assert problem.remedy == f'"max_length": {remedy} or less.'
    fits = workshop.task(spec, rows, max_length=remedy, **keys)

    assert not metric(spec).problems(fits, workshop.backbone)
    evaluate(workshop.model, workshop.backbone, [fits])


@pytest.mark.parametrize("spec", [ExactMatchSpec(), PerplexitySpec()])
def test_an_encoder_writes_no_text(tmp_path: Path, spec: Any) -> None:
    workshop = Workshop(tmp_path, "bert")
    task = workshop.task(spec, target="label")

    (problem,) = metric(task.metric).problems(task, workshop.backbone)

    assert "the base only reads it" in problem.what
