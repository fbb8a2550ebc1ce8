from __future__ import annotations

import json

import pytest

from merging.errors import DataError
from merging.report.findings import findings
from merging.report.report import Report
from merging.report.scores import TaskReport


def test_a_report_is_read_as_it_was_written(report, tmp_path):
    report.write(tmp_path / "report.json")

    assert Report.read(tmp_path / "report.json") == report
    assert json.loads((tmp_path / "report.json").read_text())["format"] == 1


def test_raw_and_normalised_scores_stand_side_by_side(report):
    mnist = report.tasks["mnist"]

    assert mnist.scores.calibrated == 0.8
    assert mnist.normalised.calibrated == pytest.approx(8 / 9)
    assert report.means.recovered == pytest.approx((0.75 + 0.5) / 2)


def test_drift_is_averaged_over_tasks(report):
    last = report.drift.mean[-1]

    assert last.block == "layers.2"
    assert last.merged.distance == pytest.approx(0.6)
    assert last.calibrated.distance == pytest.approx(0.3)


@pytest.mark.parametrize("text", ["{}", "", "{}x", '{"format": 2}', '{"unknown": 1}'])
def test_files_that_are_no_report(tmp_path, text):
    (tmp_path / "report.json").write_text(text)

    with pytest.raises(DataError, match="not a report of format 1"):
        Report.read(tmp_path / "report.json")


def test_no_report(tmp_path):
    with pytest.raises(DataError, match="does not exist"):
        Report.read(tmp_path / "report.json")


def test_surgery_says_what_inference_needs():
    report = Report.of(tasks={}, changes_inference=True)

    assert "the task must be known" in report.inference_note
    assert not Report.of(tasks={}).inference_note


def test_given_warnings_come_first_and_once(report):
    again = Report.of(
        tasks=report.tasks, solver=report.solver, warnings=["careful", "careful", *report.warnings]
    )

    assert again.warnings == ("careful", *report.warnings)


def test_nothing_to_warn_of(solve):
    tasks = {"mnist": TaskReport.of(base=0.1, expert=0.9, merged=0.5, calibrated=0.8, test_examples=500)}

    assert findings(tasks, [solve("fc1")], {}) == ()


def test_an_expert_worse_than_the_base_is_pointed_at():
    tasks = {
        "mnist": TaskReport.of(base=0.5, expert=0.2, merged=0.4),
        "svhn": TaskReport.of(base=0.1, expert=0.9, merged=0.4),
    }

    (warning,) = findings(tasks, [], {"mnist": "models/mnist"})

    assert 'expert "mnist" (models/mnist) is worse than the base' in warning
    assert "20.0% against 50.0%" in warning


def test_calibrating_that_made_it_worse():
    (warning,) = findings({"mnist": TaskReport.of(expert=0.9, merged=0.5, calibrated=0.4)}, [], {})

    assert 'task "mnist": calibrating made it worse, from 50.0% to 40.0%' in warning


def test_overlap_of_test_and_calibration():
    (warning,) = findings({"mnist": TaskReport.of(test_examples=256, overlap=10)}, [], {})

    assert "10 of 256 test examples are also calibration examples" in warning


def test_too_few_tokens_ill_conditioned_and_fallback(solve):
    rows = [
        solve("fc1", tokens=32),
        solve("fc2", condition=float("inf")),
        solve("fc3", fallback="eigh"),
        solve("fc4"),
    ]

    short, ill, fallen = findings({}, rows, {})

    assert "1 of 4 solves saw fewer tokens than features; worst: fc1 with 32 tokens for 64 features" in short
    assert "worst: fc2 with inf" in ill
    assert "fc3, eigh" in fallen
