"""What functions are given by mistake is told in one error of ours; what they take stays taken."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import merging
from merging.errors import CheckpointError, MergingError, SpecError
from merging.pipeline import Pipeline
from merging.report.report import Report
from merging.spec import parse_spec
from merging.strategies.ties import Ties

GOOD: dict[str, Any] = {
    "name": "task_arithmetic",
    "base": {"w": torch.zeros(3, 2)},
    "experts": {"a": {"w": torch.ones(3, 2)}},
}
ODD = [
    None,
    3,
    -1,
    2.5,
    float("nan"),
    True,
    "no such thing",
    "",
    "x" * 5000,
    b"bytes",
    [],
    [3],
    [None],
    {},
    {3: 3},
    {"a": None},
    {"a": 3},
    {"a": "text"},
    Path("missing"),
    object(),
    torch.zeros(2),
    np.zeros(2),
]


def test_numbers_of_numpy_and_tuples_are_taken():
    def merged(weight: Any, layers: Any) -> float:
        return float(merging.merge(**GOOD, weights={"a": weight}, scale=0.5, layers=layers)["w"][0, 0])

    layers = [{"match": "w", "scale": 0.25}]
    assert merged(np.float32(2), layers) == merged(2, tuple(layers)) == merged(np.int64(2), layers) == 0.5


@pytest.mark.parametrize("progress", [lambda: None, lambda stage, done: None, lambda *, stage: None])
def test_a_progress_that_cannot_be_called_is_refused_before_the_work(pipeline: Pipeline, progress: Any):
    with pytest.raises(SpecError, match=r"progress: .*expected a function of three arguments"):
        pipeline.run("out", progress=progress)

    assert not Path("out").exists()


@pytest.fixture
def pipeline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Pipeline:
    """Of two tensors, in a working folder of its own."""
    monkeypatch.chdir(tmp_path)
    for name, value in {"base": 0.0, "a": 1.0, "b": 2.0}.items():
        (tmp_path / name).mkdir()
        save_file({"w": torch.full((8, 4), 1.0 + value / 100)}, tmp_path / name / "model.safetensors")
    return Pipeline.from_spec({"base": "base", "experts": {"a": "a", "b": "b"}, "merge": {"type": "average"}})


def only_ours(action: Callable[[], Any]) -> None:
    """It is taken, or refused in words; other errors go through."""
    said = "taken"
    try:
        action()
    except MergingError as error:
        said = str(error)
    assert said


def made_of(value: Any, pipeline: Pipeline) -> list[Callable[[], Any]]:
    """Every call that makes or reads something, with the value."""
    good = {"base": "base", "experts": {"a": "a"}, "merge": {"type": "average"}}
    parts = pipeline.spec.model_dump()
    return [
        lambda: Pipeline(value),
        lambda: Pipeline.from_spec(value),
        lambda: Pipeline.from_spec(good, sets=value),
        lambda: merging.PipelineSpec(value),
        *(partial(merging.PipelineSpec, **{**parts, key: value}) for key in parts),
        lambda: merging.verify(value),
        lambda: merging.available(value),
        lambda: merging.strategy(value)(value),
        lambda: merging.calibrator(value)(nn.Module),
        lambda: merging.backbone("mine")(value),
        lambda: Report.read(value),
        lambda: Ties(value),
        lambda: Ties(density=value),
    ]


@pytest.mark.parametrize(
    "argument", ["name", "base", "experts", "weights", "data", "heads", "backbone", "seed", "scale", "layers"]
)
@pytest.mark.parametrize("value", ODD, ids=lambda value: f"{type(value).__name__} {str(value)[:12]}")
def test_merge_takes_a_value_or_refuses_it(argument: str, value: Any) -> None:
    only_ours(lambda: merging.merge(**{**GOOD, argument: value}))


@pytest.mark.parametrize(
    ("method", "arguments"),
    [
        ("run", ("out", "until", "device", "overwrite", "progress")),
        ("drift", ("out", "examples", "frechet", "device", "overwrite", "progress")),
        ("search", ("sweeps", "criterion", "until", "device", "progress")),
        ("validate", ("read_weights", "progress")),
        ("plan", ("read_weights", "progress")),
    ],
)
def test_methods_of_a_pipeline_take_a_value_or_refuse_it(
    pipeline: Pipeline, method: str, arguments: tuple[str, ...]
) -> None:
    more = {"sweeps": {"merge.normalize": [True, False]}} if method == "search" else {}
    for argument in arguments:
        for value in ODD:
            only_ours(lambda: getattr(pipeline, method)(**{**more, argument: value}))  # noqa: B023


def test_what_makes_pipelines_and_reads_results_takes_a_value_or_refuses_it(pipeline: Pipeline) -> None:
    for value in ODD:
        for action in made_of(value, pipeline):
            only_ours(action)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"experts": None}, "experts: found None, expected a mapping of names to models"),
        ({"experts": "models/math"}, 'experts: found the text "models/math", expected a mapping'),
        ({"experts": [{"w": torch.zeros(3, 2)}]}, "experts: found a list, expected a mapping"),
        ({"experts": {"a": 3}}, "experts.a: found the number 3, expected a mapping of tensors, a module or"),
        ({"experts": {3: GOOD["base"]}}, "experts: found the number 3 as a name, expected text"),
        ({"base": 3}, "base: found the number 3, expected a mapping of tensors, a module or a folder"),
        ({"base": ""}, "base: found an empty text, expected"),
        ({"base": "x" * 5000}, "cannot be looked at: File name too long"),
        ({"base": {"w": 3}}, "base: w: found the number 3, expected a tensor"),
        ({"base": {3: torch.zeros(2)}}, "base: 3: found the number 3 as a name, expected text"),
        ({"weights": [0.5]}, "weights: found a list, expected a mapping by the experts' names"),
        ({"weights": {"a": "1"}}, 'weights.a: found the text "1", expected a finite number'),
        ({"weights": {"a": 10**400}}, "expected a finite number"),
        ({"weights": {"b": 1.0}}, "weights.b: no such expert"),
        ({"seed": "x"}, 'seed: found the text "x", expected a whole number of at least 0'),
        ({"seed": -1}, "seed: found the number -1, expected a whole number of at least 0"),
        ({"data": {"a": [1, 2]}}, "data.a: found a list, expected examples"),
        ({"heads": {"a": 3}}, "heads.a: found the number 3, expected a function of features"),
        ({"backbone": "vit"}, 'backbone: found the text "vit", expected a Backbone'),
        ({"name": ["ties"]}, "name: found a list, expected a name"),
        ({"scale": torch.tensor(0.3)}, "scale: found a Tensor"),
        ({"type": "average"}, "type: there is no such setting"),
    ],
)
def test_a_mistaken_argument_of_merge_is_named_with_what_was_expected(
    changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(MergingError) as caught:
        merging.merge(**{**GOOD, **changes})

    assert words in str(caught.value)


def test_all_mistaken_arguments_are_told_at_once() -> None:
    with pytest.raises(SpecError) as caught:
        merging.merge("ties", None, [3], weights=3, seed="x")

    assert [problem.where for problem in caught.value.problems] == ["base", "experts", "weights", "seed"]


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (
            lambda one: one.run(seed="x"),
            "Pipeline.run() cannot be called like this\n  seed: there is no such",
        ),
        (lambda one: one.run(untl="merge"), 'did you mean "until"'),
        (lambda one: one.run(until="evaluate"), 'until: found the text "evaluate", expected "merge" or "cal'),
        (lambda one: one.run(overwrite="no"), 'overwrite: found the text "no", expected True or False'),
        (lambda one: one.run(""), "out: found an empty text, expected a path"),
        (lambda one: one.run(device=3), "device: found the number 3, expected the name of a device"),
        (lambda one: one.run(device="gpu"), 'device "gpu" cannot be used here'),
        (lambda one: one.run(device="meta"), 'device "meta" cannot be used here'),
        (lambda one: one.drift(examples=0), "examples: found the number 0, expected a whole number of at"),
        (lambda one: one.search({"merge.scale": 3}), "found the number 3, expected a list of the values"),
        (lambda one: one.search({"merge.scale": "0.3"}), 'found the text "0.3", expected a list'),
        (lambda one: one.search([3]), "found the number 3, expected a text such as merge.scale="),
        (lambda one: one.search(3), "sweeps: found the number 3, expected values by path"),
        (lambda one: one.resolve(3), "It takes no arguments."),
        (lambda one: Pipeline(), "missing a required argument: 'spec'"),
        (lambda one: Pipeline({"base": "base"}), "spec: found a dict, expected a PipelineSpec"),
        (
            lambda one: Pipeline.from_spec(3),
            "spec: found the number 3, expected the path of a spec, a dict or",
        ),
        (lambda one: Pipeline.from_spec({}, sets="seed=1"), 'sets: found the text "seed=1", expected a list'),
        (lambda one: Pipeline.from_spec(one.spec, sets=["seed=1"]), "this PipelineSpec is checked already"),
        (
            lambda one: merging.verify(None),
            "verify() cannot be called like this\n  folder: found None, expected",
        ),
        (lambda one: merging.verify(), "missing a required argument: 'folder'"),
        (lambda one: merging.available("strategy"), 'did you mean "strategies"'),
        (lambda one: merging.strategy(Ties), "a strategy needs a name: found"),
        (lambda one: merging.strategy("mine")(3), 'strategy "mine": found the number 3, expected a class'),
        (lambda one: merging.strategy("mine")(nn.Linear), "Linear does not derive from Merger"),
        (lambda one: merging.PipelineSpec(base="b"), "merge: missing"),
        (lambda one: merging.PipelineSpec(base="b", merge="ties", sed=1), "sed: unknown"),
        (
            lambda one: Ties(density=2),
            'settings of "ties"\n  density: found the number 2, expected at most 1',
        ),
        (lambda one: Ties({"density": 0.2}), 'settings of "ties": found a dict, expected Ties.Settings(...)'),
        (lambda one: Ties(Ties.Settings(), density=0.2), "are given twice"),
        (lambda one: Ties(seed="x"), 'seed: found the text "x", expected a whole number'),
        (lambda one: Report.read("."), "report . cannot be read"),
    ],
)
def test_a_mistaken_call_is_told_with_what_was_expected(
    pipeline: Pipeline, call: Callable[[Pipeline], Any], words: str
) -> None:
    with pytest.raises(MergingError) as caught:
        call(pipeline)

    assert words in str(caught.value)


def test_what_fits_is_taken_in_every_form(pipeline: Pipeline, tmp_path: Path) -> None:
    module = nn.Linear(2, 3)
    experts = nn.ModuleDict({"a": nn.Linear(2, 3)})
    raw = {"base": "base", "experts": {"a": "a"}, "merge": "average"}

    assert set(merging.merge("average", module, experts, weights={"a": 2}, seed=np.int64(3))) == {
        "weight",
        "bias",
    }
    assert merging.merge("average", tmp_path / "base", {"a": "a"}, weights=None)["w"].shape == (8, 4)
    for sets in ([], ["seed=1"], ("seed=1",), {"seed=1"}, {"seed=1": 0}.keys()):
        assert Pipeline.from_spec(raw, sets=sets).spec.seed == (1 if sets else 0)
    assert Pipeline.from_spec(parse_spec(raw, tmp_path, "one")).spec.base.model == str(tmp_path / "base")
    report = pipeline.run("out", until="merge", device="cpu", overwrite=True, progress=lambda *_: None)
    assert Report.read(str(tmp_path / "out" / "report.json")) == report
    assert merging.verify("out").unchanged
    assert pipeline.plan(read_weights=True).experts.keys() == {"a", "b"}


def test_an_error_may_be_made_of_another_one() -> None:
    assert str(CheckpointError(ValueError("the reason"))) == "the reason"  # type: ignore[arg-type]
