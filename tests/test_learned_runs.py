"""Whole runs of methods that look at predictions: where their heads come from, what the report says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_pipeline import TASKS, run, spec_of, weights, workshop  # noqa: F401

from merging.calibrators.prob_surgery_training import load_distributions
from merging.errors import DataError, SpecError
from merging.pipeline import Pipeline
from merging.report.table import render

LEARNED = {"type": "ada_merging", "steps": 3, "granularity": "task"}


def test_fisher_takes_its_heads_from_the_tasks(workshop: Path, tmp_path: Path):  # noqa: F811
    report = run(workshop, tmp_path / "out", merge={"type": "fisher"}, calibrate=[])

    manifest = json.loads((tmp_path / "out" / "merged" / "manifest.json").read_text())
    assert manifest["notes"]["fisher_norms"].keys() == set(TASKS)
    assert all(norm > 0 for norm in manifest["notes"]["fisher_norms"].values())
    assert report.tasks["digits"].scores.merged is not None
    assert not list((tmp_path / "out" / ".merging" / "work").glob("*"))


def test_learned_coefficients_are_in_report_and_table(workshop: Path, tmp_path: Path):  # noqa: F811
    report = run(workshop, tmp_path / "out", merge=LEARNED, calibrate=[])

    assert report.coefficients.keys() == {"all tensors"}
    assert report.coefficients["all tensors"].keys() == set(TASKS)
    assert "learned coefficients: digits 0." in render(report)
    again = run(workshop, tmp_path / "again", merge=LEARNED, calibrate=[])
    assert again.coefficients == report.coefficients
    one, other = (weights(tmp_path / name / "merged") for name in ("out", "again"))
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_search_may_learn_at_every_point(workshop: Path):  # noqa: F811
    pipeline = Pipeline.from_spec(spec_of(workshop, merge=LEARNED, calibrate=[]))

    found = pipeline.search(["merge.initial=0.0,0.3"], criterion="features")

    assert found.curve is not None
    assert found.curve.best == {"merge.initial": 0.3}


def test_prob_surgery_leaves_a_module_per_task(workshop: Path, tmp_path: Path):  # noqa: F811
    surgery = {"type": "prob_surgery", "hidden": 8, "steps": 30, "learning_rate": 0.01}

    report = run(workshop, tmp_path / "out", calibrate=surgery)

    assert report.changes_inference
    assert load_distributions(tmp_path / "out" / "heads").keys() == set(TASKS)
    merged, calibrated = (weights(tmp_path / "out" / stage) for stage in ("merged", "calibrated"))
    assert all(torch.equal(merged[name], calibrated[name]) for name in merged)
    (tmp_path / "out" / "report.json").unlink()
    again = run(workshop, tmp_path / "out", calibrate=surgery)
    assert again.tasks == report.tasks


@pytest.mark.parametrize("rule", ["fisher", "ada_merging"])
def test_a_task_without_head_is_told_before_any_work(workshop: Path, rule: str):  # noqa: F811
    spec = spec_of(workshop, merge={"type": rule}, calibrate=[])
    del spec["tasks"]["letters"]["head"], spec["tasks"]["letters"]["test"]

    with pytest.raises(DataError, match=rf'letters\.head: strategy "{rule}" needs a head, and the expert'):
        Pipeline.from_spec(spec).validate()


def test_a_rule_that_needs_examples_says_so(workshop: Path):  # noqa: F811
    spec = spec_of(workshop, merge={"type": "fisher"}, calibrate=[])
    del spec["tasks"]["letters"]

    with pytest.raises(SpecError, match=r'tasks\.letters\.calibration: missing: strategy "fisher" needs'):
        Pipeline.from_spec(spec)


def test_another_head_is_another_merge(workshop: Path, tmp_path: Path):  # noqa: F811
    spec = spec_of(workshop, merge={"type": "fisher"}, calibrate=[])
    head = load_file(workshop / "digits-head.safetensors")
    place = tmp_path / "head.safetensors"
    spec["tasks"]["digits"]["head"]["path"] = str(place)
    save_file(head, place)
    Pipeline.from_spec(spec).run(tmp_path / "out")
    before = weights(tmp_path / "out" / "merged")

    save_file({name: 3 * tensor for name, tensor in head.items()}, place)
    Pipeline.from_spec(spec).run(tmp_path / "out")

    after = weights(tmp_path / "out" / "merged")
    assert not all(torch.equal(before[name], after[name]) for name in before)


def test_a_plan_estimates_what_gradients_cost(workshop: Path):  # noqa: F811
    peaks = {
        rule: Pipeline.from_spec(spec_of(workshop, merge={"type": rule}, calibrate=[])).plan().steps[0]
        for rule in ("fisher", "ada_merging")
    }

    assert peaks["fisher"].needs == ("data", "gradients", "heads")
    assert all(step.peak_bytes > 0 and step.memory_law for step in peaks.values())
