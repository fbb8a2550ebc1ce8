"""The lm-eval harness on a task file and data of the test's own."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from tiny_texts import KINDS, Workshop, sentences, written

from merging.data.task import Task
from merging.errors import DataError
from merging.evaluation.evaluator import evaluate
from merging.evaluation.metric_spec import ChoiceSpec, LmEvalSpec
from merging.evaluation.metrics import metric

pytestmark = pytest.mark.filterwarnings("ignore")  # of the harness and what it imports

TASK = """
task: tiny_movie
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
  cache_dir: {cache}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{text}}}}\\nAnswer:"
doc_to_choice: ["neg", "pos"]
doc_to_target: number
metric_list:
  - metric: acc
    aggregation: mean
    higher_is_better: true
"""


@pytest.fixture(params=KINDS)
def workshop(request: pytest.FixtureRequest, tmp_path: Path) -> Workshop:
    made = Workshop(tmp_path, request.param)
    made.backbone.folder = tmp_path / "base"
    rows = [{**row, "number": ("neg", "pos").index(row["label"])} for row in sentences(10)]
    data = written(tmp_path / "data" / "movie.jsonl", rows)
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "movie.yaml").write_text(TASK.format(data=data, cache=tmp_path / "cache"))
    return made


def asked(workshop: Workshop, **changes: Any) -> Task:
    keys = {"tasks": ("tiny_movie",), "include_path": workshop.folder / "tasks", **changes}
    return Task("movie", metric=LmEvalSpec(**keys))


def test_the_harness_scores_as_choice_does(workshop: Workshop) -> None:
    task = asked(workshop)
    answers = {"neg": " neg", "pos": " pos"}
    own = workshop.task(ChoiceSpec(), sentences(10), label="label", labels=answers)

    assert not metric(task.metric).problems(task, workshop.backbone)
    score = evaluate(workshop.model, workshop.backbone, [task])["movie"]

    expected = evaluate(workshop.model, workshop.backbone, [own])["movie"]
    assert (score.metric, score.examples, score.lower_is_better) == ("lm_eval", 10, False)
    if workshop.name == "llama":  # of an encoder-decoder the harness leaves the end of the answer out
        assert score.value == pytest.approx(expected.value)


def test_a_limit_and_a_score_that_is_not_there(workshop: Workshop) -> None:
    score = evaluate(workshop.model, workshop.backbone, [asked(workshop, limit=4)])["movie"]
    assert score.examples == 4

    with pytest.raises(DataError, match=r'(?s)no score "f1,none".*acc,none'):
        evaluate(workshop.model, workshop.backbone, [asked(workshop, metric="f1,none", limit=4)])


def test_a_task_that_the_harness_lacks(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    from merging.evaluation import lm_eval

    manager = lm_eval._task_manager
    monkeypatch.setattr(lm_eval, "_task_manager", lambda place, with_defaults: manager(place, False))
    task = asked(workshop, tasks=("tiny_film",))

    (problem,) = metric(task.metric).problems(task, workshop.backbone)

    assert 'no task "tiny_film"' in problem.what
    assert "tiny_movie" in problem.remedy


def test_without_the_extra_the_install_line_is_told(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    from merging.evaluation import lm_eval

    lm_eval._task_manager.cache_clear()
    monkeypatch.setitem(sys.modules, "lm_eval.tasks", None)
    task = asked(workshop)

    (problem,) = metric(task.metric).problems(task, workshop.backbone)

    assert "merging[lm-eval]" in problem.remedy
