"""What a spec may say of texts, data sets and metrics."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from merging.errors import SpecError
from merging.evaluation.metric_spec import METRIC_TYPES, ChoiceSpec
from merging.spec import parse_spec


@pytest.fixture
def texts(good: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The good spec, its first task on text."""
    (folder / "data" / "movie.jsonl").touch()
    good["tasks"]["mnist"] = {
        "calibration": {
            "type": "text",
            "path": "data/movie.jsonl",
            "prompt": "{text}\nAnswer:",
            "max_length": 64,
        },
        "test": {
            "type": "text",
            "path": "data/movie.jsonl",
            "label": "label",
            "labels": {"neg": " negative", "pos": [" positive", " good"]},
        },
        "metric": "choice",
    }
    return good


def problems_of(raw: dict[str, Any], folder: Path) -> dict[str, str]:
    with pytest.raises(SpecError) as caught:
        parse_spec(raw, folder, "spec")
    return {problem.where: f"{problem.what} {problem.remedy}" for problem in caught.value.problems}


def test_text_is_read_with_all_that_may_be_said_of_it(texts: dict[str, Any], folder: Path) -> None:
    task = parse_spec(texts, folder, "spec").tasks["mnist"]

    assert task.calibration.path == folder / "data" / "movie.jsonl"  # type: ignore[union-attr]
    assert task.test.labels == {"neg": " negative", "pos": (" positive", " good")}  # type: ignore[union-attr]
    assert task.metric == ChoiceSpec()


@pytest.mark.parametrize("name", [name for name in METRIC_TYPES if name != "lm_eval"])
def test_a_metric_is_a_name_or_an_object(texts: dict[str, Any], folder: Path, name: str) -> None:
    found = []
    for asked in (name, {"type": name}):
        texts["tasks"]["mnist"]["metric"] = asked
        found.append(parse_spec(texts, folder, "spec").tasks["mnist"].metric)

    assert found[0] == found[1] == METRIC_TYPES[name]()


CASES = {
    "a misspelt metric": ("metric", "acuracy", "metric.type", 'did you mean "accuracy"'),
    "a misspelt setting": (
        "metric",
        {"type": "choice", "normalize": "tokens"},
        "metric.normalize",
        "normalise",
    ),
    "a metric without tasks": ("metric", "lm_eval", "metric.tasks", "missing"),
    "no folder of task files": (
        "metric",
        {"type": "lm_eval", "tasks": ["x"], "include_path": "nowhere"},
        "metric.include_path",
        "no such folder",
    ),
    "a number": ("metric", 3, "metric", "expected an object"),
}


@pytest.mark.parametrize(("key", "value", "where", "words"), CASES.values(), ids=CASES)
def test_what_is_wrong_with_a_metric_is_told(
    texts: dict[str, Any], folder: Path, key: str, value: Any, where: str, words: str
) -> None:
    texts["tasks"]["mnist"][key] = value

    found = problems_of(texts, folder)

    assert words in found[f"tasks.mnist.{where}"]


SOURCES = {
    "answers without classes": ({"labels": {"a": "b", "c": "d"}}, "", 'Give "label" too'),
    "one class": ({"label": "label", "labels": {"a": "b"}}, "", "fewer than two classes"),
    "an open brace": ({"prompt": "{text"}, "", "cannot be read"),
    "no column": ({"prompt": "Answer:"}, "", "has no column"),
    "an expression": ({"prompt": "{text!r:>10}"}, "", "something else than a column"),
    "no length": ({"max_length": 0}, ".max_length", "at least 1"),
    "a misspelt key": ({"promt": "{text}"}, ".promt", 'did you mean "prompt"'),
    "no file": ({"path": "data/movi.jsonl"}, ".path", 'did you mean "data/movie.jsonl"'),
}


@pytest.mark.parametrize(("changes", "where", "words"), SOURCES.values(), ids=SOURCES)
def test_what_is_wrong_with_a_text_is_told(
    texts: dict[str, Any], folder: Path, changes: dict[str, Any], where: str, words: str
) -> None:
    texts["tasks"]["mnist"]["calibration"] |= changes

    found = problems_of(texts, folder)

    assert words in found[f"tasks.mnist.calibration{where}"]


def test_a_data_set_is_a_folder_or_a_name(texts: dict[str, Any], folder: Path) -> None:
    tests = {"type": "dataset", "split": "test"}
    texts["tasks"]["mnist"] |= {
        "calibration": {**tests, "path": "data/mnist"},
        "test": {**tests, "path": "glue"},
    }

    task = parse_spec(texts, folder, "spec").tasks["mnist"]

    assert task.calibration.path == str(folder / "data" / "mnist")  # type: ignore[union-attr]
    assert task.test.path == "glue"  # type: ignore[union-attr]
    texts["tasks"]["mnist"]["test"]["path"] = "./glue"
    assert "no such folder" in problems_of(texts, folder)["tasks.mnist.test.path"]


def test_the_examples_of_the_page_on_text_are_valid(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "text.md").read_text(encoding="utf-8")
    examples = [json.loads(block) for block in re.findall(r"```json\n(\{.*?\n\})\n```", page, re.DOTALL)]
    assert len(examples) == 2

    for raw in examples:
        for ref in (raw["base"], *raw["experts"].values()):
            (tmp_path / (ref if isinstance(ref, str) else ref["adapter"])).mkdir(parents=True, exist_ok=True)
        for task in raw["tasks"].values():
            for source in (task["calibration"], task["test"]):
                place = tmp_path / source["path"]
                place.parent.mkdir(parents=True, exist_ok=True)
                place.touch()
        assert parse_spec(raw, tmp_path, "spec").tasks.keys() == raw["experts"].keys()


def test_a_plug_in_that_a_score_would_not_see(texts: dict[str, Any], folder: Path) -> None:
    texts["calibrate"] = {"type": "surgery"}

    found = problems_of(texts, folder)

    assert "reads no head" in found["tasks.mnist.metric"]
