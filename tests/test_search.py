"""Searches: which points a sweep means, what each is worth, and that the test examples have no say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from test_pipeline import TASKS, run, spec_of, weights, workshop  # noqa: F401
from tiny_models import Given, pixels

from merging.data.portion import Portion
from merging.errors import DataError, NumericalError, SpecError
from merging.pipeline import Pipeline
from merging.report.curve import Curve, CurvePoint, curve_lines
from merging.report.report import Report
from merging.report.table import markdown, render
from merging.search_grid import axes_of, grid, specs_at

SCALES = "merge.scale=0.2:0.6:0.2"


@pytest.mark.parametrize(
    ("text", "path", "values"),
    [
        (SCALES, "merge.scale", [0.2, 0.4, 0.6]),
        ("merge.scale=0.1:1.0:0.1", "merge.scale", [place / 10 for place in range(1, 11)]),
        ("merge.density=0.2,0.5, 1", "merge.density", [0.2, 0.5, 1]),
        ("calibrate.rank=4:16:4", "calibrate.rank", [4, 8, 12, 16]),
        ("merge.scale=1:0:-0.5", "merge.scale", [1.0, 0.5, 0.0]),
        ("merge.elect=mass,normfrac", "merge.elect", ["mass", "normfrac"]),
        ('merge.skip=[[], ["a"]]', "merge.skip", [[], ["a"]]),
        ('experts."a.b".weight=1,2', 'experts."a.b".weight', [1, 2]),
        ("merge.scale=0.3,0.3", "merge.scale", [0.3]),
        ("merge.layers.0.scale=1e-1:2e-1:1e-1", "merge.layers.0.scale", [0.1, 0.2]),
    ],
)
def test_values_of_a_sweep(text, path, values):
    (axis,) = axes_of([text])

    assert (axis.path, list(axis.values)) == (path, values)


@given(st.integers(-50, 50), st.integers(1, 20), st.integers(1, 30))
def test_a_range_holds_both_ends_in_steps_that_people_write(start, step, count):
    stop = start + (count - 1) * step

    (axis,) = axes_of([f"merge.scale={start / 10}:{stop / 10}:{step / 10}"])

    assert list(axis.values) == [(start + step * place) / 10 for place in range(count)]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("merge.scale", r"--sweep merge\.scale: expected PATH=VALUES, such as merge\.scale=0\.1:1\.0:0\.1"),
        ("merge.scale=", "no values are given"),
        ("merge.scale=a:b:c", '"a:b:c" is not a range of numbers; expected START:STOP:STEP'),
        ("merge.scale=0:1", '"0:1" is not a range of numbers'),
        ("merge.scale=0:inf:1", '"0:inf:1" is not a range of numbers'),
        ("merge.scale=0:1:0", "steps of 0 do not lead from 0 to 1"),
        ("merge.scale=0:1:-1", "steps of -1 do not lead from 0 to 1"),
        ("merge.scale=0:1:0.0001", "has 10001 values; at most 200"),
        ("merge.scale=1,,2", "an empty value between two commas"),
        ("seed=1,2", r"a sweep changes settings: merge\.NAME, calibrate\.NAME, or experts\.NAME\.weight"),
        ("experts.a.model=x,y", "a sweep changes settings"),
        ("merge.type=ties,average", '"type" cannot be swept'),
        ('merge.scale=[{"a": 1}]', "found an object, expected single values"),
    ],
)
def test_what_cannot_be_swept_is_told(text, words):
    with pytest.raises(SpecError, match=words):
        axes_of([text])


def test_all_problems_of_several_sweeps_are_told_at_once():
    with pytest.raises(SpecError, match=r"is swept twice[\s\S]*cannot be swept"):
        axes_of(["merge.scale=1,2", "merge.scale=3", "merge.type=ties"])


def test_too_many_points_are_refused_with_the_sizes():
    axes = axes_of(["merge.scale=1:100:1", "merge.density=0.1,0.2,0.3"])

    with pytest.raises(
        SpecError, match=r"300 points \(100 of merge\.scale x 3 of merge\.density\); at most 200"
    ):
        grid(axes)


def test_a_grid_has_every_combination_and_merges_change_slowest():
    axes = axes_of({"calibrate.ridge": [1, 2], "merge.scale": [3, 4]})

    assert [tuple(point.values()) for point in grid(axes)] == [(3, 1), (3, 2), (4, 1), (4, 2)]
    assert list(grid(axes)[0]) == ["merge.scale", "calibrate.ridge"]


def at(workshop: Path, sweep: str, **changes: Any) -> list[Any]:  # noqa: F811
    spec = Pipeline.from_spec(spec_of(workshop, **changes)).spec
    return specs_at(spec, grid(axes_of([sweep])))


def test_a_point_is_the_spec_with_that_value(workshop: Path):  # noqa: F811
    first, second = at(workshop, "calibrate.ridge=0.1,0.2")
    same, _ = at(workshop, "calibrate.0.ridge=0.1,0.2")
    heavy, _ = at(workshop, "experts.digits.weight=2,3")

    assert (first.calibrate[0].settings.ridge, second.calibrate[0].settings.ridge) == (0.1, 0.2)
    assert same == first
    assert first == Pipeline.from_spec(spec_of(workshop), sets=["calibrate.ridge=0.1"]).spec.model_copy(
        update={"output": first.output}
    )
    assert heavy.experts["digits"].weight == 2


@pytest.mark.parametrize(
    ("sweep", "words"),
    [
        ("merge.scal=1,2", r'merge\.scal: unknown key\s+did you mean "scale"'),
        ("merge.density=0:1:0.5", r"merge\.density: found the number 0.0, expected more than 0"),
        ("calibrate.1.ridge=1,2", r'"1" is not a position in it'),
        ("merge.scale.x=1,2", r"nothing can be set inside it"),
        ("merge.layers.0.scale=1,2", r"merge\.layers"),
        (
            "experts.digit.weight=1,2",
            r'experts\.digit: there is no expert of this name\s+did you mean "digits"',
        ),
        ("experts.digits.weight=a,b", r"experts\.digits\.weight: found the text"),
    ],
)
def test_points_are_checked_like_specs(workshop: Path, sweep: str, words: str):  # noqa: F811
    with pytest.raises(SpecError, match=words):
        at(workshop, sweep, merge={"type": "ties"})


def test_portions_share_out_the_examples():
    whole = Given(pixels(5), pixels(2, seed=1), pixels(1, seed=2), pixels(3, seed=3))

    held, rest = (
        Portion(whole, lambda n, held=held: (n % 4 == 3) == held, str(held)) for held in (True, False)
    )

    every = torch.cat([batch["pixel_values"] for batch in whole.batches()])
    parts = [torch.cat([batch["pixel_values"] for batch in part.batches()]) for part in (held, rest)]
    assert (len(held), len(rest)) == (2, 9)
    assert torch.equal(parts[0], every[[3, 7]])
    assert torch.equal(parts[1], every[[n for n in range(11) if n % 4 != 3]])
    assert held.fingerprint != rest.fingerprint
    assert len(held.batches()[:1]) == 1


ARITHMETIC = {"type": "task_arithmetic"}


def test_the_best_point_is_run_and_the_report_has_the_curve(workshop: Path, tmp_path: Path):  # noqa: F811
    pipeline = Pipeline.from_spec(spec_of(workshop, merge=ARITHMETIC, calibrate=[]))

    found = pipeline.search(["merge.scale=0.0,0.3,3.0"])
    report = found.run(tmp_path / "out")

    assert report.curve is not None
    means = [point.mean for point in report.curve.points]
    assert found.spec.merge.settings.scale == report.curve.best["merge.scale"]
    assert report.curve.points[means.index(min(means))].values == report.curve.best
    assert report.curve.points[0].tasks.keys() == set(TASKS)
    assert report.curve.judged_on.endswith("on which nothing is fitted")
    manifest = json.loads((tmp_path / "out" / "merged" / "manifest.json").read_text())
    assert manifest["spec"]["merge"]["scale"] == report.curve.best["merge.scale"]
    assert Report.read(tmp_path / "out" / "report.json").curve == report.curve
    assert "<- taken" in render(report)
    assert "| merge.scale |" in markdown(report)


def test_what_a_point_is_worth_is_the_distance_of_the_run_with_its_value(workshop: Path, tmp_path: Path):  # noqa: F811
    from merging.architecture import select_backbone
    from merging.backbones.clip_vision import ClipVision
    from merging.checkpoints.folder import config, open_checkpoint
    from merging.evaluation.forward import features
    from merging.spec.component import AUTO, AutoSettings, Component
    from merging.streaming import load_model

    spec = spec_of(workshop, merge=ARITHMETIC, calibrate=[])
    (point,) = Pipeline.from_spec(spec).search(["merge.scale=0.4"]).curve.points
    run(workshop, tmp_path / "out", merge={**ARITHMETIC, "scale": 0.4}, calibrate=[])

    backbone = select_backbone(workshop / "base", Component(type=AUTO, settings=AutoSettings()))
    assert isinstance(backbone, ClipVision)
    assert config(workshop / "base")
    batch = load_file(workshop / "digits-calibration.safetensors")
    ours, theirs = (
        features(load_model(backbone, open_checkpoint(folder, "x")), backbone, batch)
        for folder in (tmp_path / "out" / "merged", workshop / "digits")
    )
    distance = ((ours - theirs).norm(dim=1) / theirs.norm(dim=1)).mean().item()
    assert point.tasks["digits"] == pytest.approx(distance, rel=1e-4)


def test_test_examples_are_never_opened_by_a_search(workshop: Path, monkeypatch: pytest.MonkeyPatch):  # noqa: F811
    pipeline = Pipeline.from_spec(spec_of(workshop, merge=ARITHMETIC, calibrate=[]))
    for task in pipeline.tasks().values():
        monkeypatch.setattr(task.test, "batches", lambda: pytest.fail("the test examples were read"))

    found = pipeline.search([SCALES])

    assert len(found.curve.points) == 3


def test_with_a_calibrator_every_fourth_example_is_held_out_of_the_fit(workshop: Path):  # noqa: F811
    pipeline = Pipeline.from_spec(spec_of(workshop, merge=ARITHMETIC))

    found = pipeline.search(["calibrate.ridge=0.01,10", "merge.scale=0.2,0.3"])

    assert found.curve.examples == dict.fromkeys(TASKS, 10)
    assert found.curve.judged_on == "held-out calibration examples"
    assert [point.values["merge.scale"] for point in found.curve.points] == [0.2, 0.2, 0.3, 0.3]
    assert len({point.mean for point in found.curve.points}) == 4


def test_until_merge_judges_the_merge_alone(workshop: Path):  # noqa: F811
    one = Pipeline.from_spec(spec_of(workshop, merge=ARITHMETIC)).search([SCALES], until="merge")
    other = Pipeline.from_spec(spec_of(workshop, merge=ARITHMETIC, calibrate=[])).search([SCALES])

    assert one.curve.points == other.curve.points


def test_modules_that_change_inference_are_judged_too(workshop: Path):  # noqa: F811
    surgery = {"type": "surgery", "iterations": 40, "learning_rate": 0.01}
    pipeline = Pipeline.from_spec(spec_of(workshop, merge=ARITHMETIC, calibrate=surgery))

    found = pipeline.search(["calibrate.iterations=1,40"])

    assert found.curve.best == {"calibrate.iterations": 40}


def test_entropy_looks_at_predictions(workshop: Path):  # noqa: F811
    pipeline = Pipeline.from_spec(spec_of(workshop, merge=ARITHMETIC, calibrate=[]))

    found = pipeline.search([SCALES], criterion="entropy")

    means = [point.mean for point in found.curve.points]
    assert min(means) == means[[point.values for point in found.curve.points].index(found.curve.best)]
    assert all(0 < mean < 1.61 for mean in means)


@pytest.fixture
def validated(workshop: Path, tmp_path: Path) -> dict[str, Any]:  # noqa: F811
    """A spec whose tasks have validation examples, labelled by the experts."""
    from transformers import CLIPVisionModel

    spec = spec_of(workshop, merge=ARITHMETIC, calibrate=[])
    for seed, task in enumerate(TASKS):
        images, head = pixels(30, seed=200 + seed), load_file(workshop / f"{task}-head.safetensors")
        with torch.no_grad():
            features = CLIPVisionModel.from_pretrained(workshop / task)(**images).pooler_output
        labels = (features @ head["weight"].T + head["bias"]).argmax(1)
        save_file({**images, "labels": labels}, tmp_path / f"{task}.safetensors")
        path = str(tmp_path / f"{task}.safetensors")
        spec["tasks"][task]["validation"] = {"type": "tensors", "path": path}
    return spec


def test_validation_examples_choose_where_there_are_some(validated: dict[str, Any], tmp_path: Path):
    pipeline = Pipeline.from_spec(validated)

    found = pipeline.search(["merge.scale=0.0,0.3,0.0001"])

    assert found.curve.criterion == "validation"
    assert found.curve.examples == dict.fromkeys(TASKS, 30)
    means = [point.mean for point in found.curve.points]
    assert found.curve.best == found.curve.points[means.index(max(means))].values
    assert pipeline.plan().tasks["digits"].validation_used == 30
    assert "validation examples" in render(found.run(tmp_path / "out"))


def test_validation_examples_that_are_test_examples_are_refused(workshop: Path, validated: dict[str, Any]):  # noqa: F811
    validated["tasks"]["signs"]["validation"]["path"] = str(workshop / "signs-test.safetensors")

    with pytest.raises(DataError, match=r"tasks\.signs\.validation: 60 of 60 test examples are among them"):
        Pipeline.from_spec(validated).search([SCALES])


def test_validation_examples_need_labels(workshop: Path, validated: dict[str, Any]):  # noqa: F811
    validated["tasks"]["signs"]["validation"]["path"] = str(workshop / "signs-calibration.safetensors")

    with pytest.raises(DataError, match=r'validation data has no "labels"'):
        Pipeline.from_spec(validated).validate()


def test_what_a_criterion_needs_is_told(workshop: Path):  # noqa: F811
    spec = spec_of(workshop, merge=ARITHMETIC, calibrate=[])
    with pytest.raises(DataError, match=r"tasks\.digits\.validation: missing"):
        Pipeline.from_spec(spec).search([SCALES], criterion="validation")

    for task in spec["tasks"].values():
        task.pop("head"), task.pop("test")
    spec["tasks"]["signs"].pop("calibration")
    with pytest.raises(
        DataError, match=r"tasks\.signs\.calibration: missing[\s\S]*tasks\.digits\.head: missing"
    ):
        Pipeline.from_spec(spec).search([SCALES], criterion="entropy")


def test_too_few_examples_to_hold_any_out(workshop: Path):  # noqa: F811
    spec = spec_of(workshop, merge=ARITHMETIC)
    spec["tasks"]["signs"]["calibration"]["examples"] = 3

    with pytest.raises(DataError, match="every 4th calibration example out of the fit, and signs has fewer"):
        Pipeline.from_spec(spec).search([SCALES])


def test_a_point_that_fails_is_a_point_of_no_worth(workshop: Path):  # noqa: F811
    task, half = TASKS[0], {"dtype": "float16"}  # which cannot hold what the larger weight makes
    path = f"experts.{task}.weight"
    pipeline = Pipeline.from_spec(spec_of(workshop, merge=ARITHMETIC, calibrate=[], output=half))

    found = pipeline.search({path: [1.0, 1e12]})

    assert found.curve.best == {path: 1.0}
    assert found.curve.points[1].mean is None
    assert found.curve.points[1].note
    with pytest.raises(NumericalError, match="every point of the search failed"):
        pipeline.search({path: [1e12]})


def test_the_same_search_again_does_nothing_again(workshop: Path, tmp_path: Path):  # noqa: F811
    def once() -> Report:
        pipeline = Pipeline.from_spec(spec_of(workshop, merge=ARITHMETIC, calibrate=[]))
        return pipeline.search([SCALES]).run(tmp_path / "out")

    assert once() == once()


def test_a_best_value_at_the_end_of_the_range_is_warned_of(workshop: Path, tmp_path: Path):  # noqa: F811
    pipeline = Pipeline.from_spec(spec_of(workshop, merge=ARITHMETIC, calibrate=[]))

    report = pipeline.search(["merge.scale=2:4:1"]).run(tmp_path / "out")

    assert any("best merge.scale is the smallest or largest value tried, 2" in one for one in report.warnings)


def test_experts_weights_can_be_searched(workshop: Path, tmp_path: Path):  # noqa: F811
    pipeline = Pipeline.from_spec(spec_of(workshop, merge={"type": "average"}, calibrate=[]))

    found = pipeline.search(["experts.digits.weight=0,5"])
    found.run(tmp_path / "out")

    weight = found.curve.best["experts.digits.weight"]
    experts = spec_of(workshop)["experts"]
    wanted = {**experts, "digits": {"model": experts["digits"], "weight": weight}}
    run(workshop, tmp_path / "plain", calibrate=[], experts=wanted)
    ours, theirs = (weights(tmp_path / name / "merged") for name in ("out", "plain"))
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_a_curve_of_many_tasks_is_printed_without_them():
    tasks = {f"a task of some length {number}": 0.5 for number in range(9)}
    points = tuple(CurvePoint(values={"merge.scale": scale}, tasks=tasks, mean=0.5) for scale in (0.1, 0.2))
    curve = Curve(
        criterion="features",
        meaning="m",
        examples=dict.fromkeys(tasks, 3),
        judged_on="examples",
        points=points,
        best={"merge.scale": 0.1},
    )

    lines = curve_lines(curve, 100)

    assert max(map(len, lines)) <= 100
    assert lines[2].split() == ["0.1", "0.5000", "<-", "taken"]
