"""What the report says where calibrating moved a task away from its expert."""

from __future__ import annotations

import pytest

from merging.evaluation.drift import BlockDrift, ModelDrift, OutputDrift
from merging.report.card import with_harm
from merging.report.drift import DriftReport
from merging.report.drift_plot import drift_plot
from merging.report.drift_table import drift_table
from merging.report.harm import harm_finding
from merging.report.report import Report


def model(distance, *, examples=4, blocks=2):
    rows = tuple(
        BlockDrift(
            f"layers.{i}",
            1 - distance,
            distance,
            17,
            local=distance / 2,
            upstream=distance / 3,
            local_share=0.6,
            frechet=7.0,
            frechet_relative=distance / 4,
        )
        for i in range(blocks)
    )
    return ModelDrift(rows, OutputDrift((1 - distance,) * examples, (distance,) * examples))


def drift_of(**tasks):
    """Task -> output distance before and after."""
    measured = {
        task: {"merged": model(before), "calibrated": model(after)} for task, (before, after) in tasks.items()
    }
    return DriftReport.of(measured, examples=16, measured_on=dict.fromkeys(tasks, "spare examples"))


def test_nothing_is_said_where_calibrating_helped():
    assert harm_finding(drift_of(mnist=(0.4, 0.2), svhn=(0.3, 0.3))) is None


def test_a_few_percent_are_noise():
    assert harm_finding(drift_of(mnist=(0.300, 0.309))) is None


def test_one_outlier_is_no_harm():
    before = OutputDrift((0.9,) * 4, (0.1,) * 4)
    after = OutputDrift((0.9,) * 4, (0.05, 0.05, 0.05, 2.0))
    measured = {"mnist": {"merged": ModelDrift((), before), "calibrated": ModelDrift((), after)}}

    assert harm_finding(DriftReport.of(measured, examples=16)) is None


def test_the_task_its_numbers_and_what_to_do_are_said():
    found = harm_finding(drift_of(mnist=(0.4, 0.2), svhn=(0.2, 0.3)))

    assert "moved 1 of 2 tasks away" in found
    assert '"svhn" 0.200 to 0.300' in found
    assert "cosine 0.800 to 0.700" in found
    assert "farther on 4 of 4 spare examples, from block layers.0 on" in found
    assert "mnist" not in found
    assert "more calibration examples, a larger ridge" in found
    assert "keep merged/" in found


def test_the_worst_come_first_and_many_are_counted():
    tasks = {f"task{number}": (0.1, 0.1 + 0.01 * number) for number in range(1, 7)}

    found = harm_finding(drift_of(**tasks))

    assert "moved all of them away" in found
    assert found.index('"task6"') < found.index('"task5"') < found.index('"task3"')
    assert "; and 2 more" in found
    assert "task1" not in found


def test_a_task_that_was_perfect_before_can_only_be_harmed():
    assert '"mnist" 0.000 to 0.100' in harm_finding(drift_of(mnist=(0.0, 0.1)))
    assert harm_finding(drift_of(mnist=(0.0, 0.0))) is None


def test_it_is_one_of_the_reports_warnings():
    harmed, helped = drift_of(svhn=(0.2, 0.3)), drift_of(svhn=(0.3, 0.2))

    (warning,) = Report.of(tasks={}, drift=harmed).warnings

    assert warning == harm_finding(harmed)
    assert not Report.of(tasks={}, drift=helped).warnings


def test_a_model_card_says_it_once_and_forgets_it():
    card = "# Calibrated model\n\nText.\n"

    told = with_harm(card, 'moved "a_b" away')

    assert told.startswith(card)
    assert told.endswith('\n## Beware: drift\n\nmoved "a\\_b" away\n')
    assert with_harm(told, 'moved "a_b" away') == told
    assert with_harm(told, None) == card


def test_the_table_has_each_task_their_mean_and_the_output():
    text = drift_table(drift_of(mnist=(0.4, 0.2), svhn=(0.2, 0.3)))

    assert "mnist, on 4 spare examples" in text
    assert "mean of 2 tasks" in text
    assert "final features" in text
    (first, *_) = [line for line in text.splitlines() if line.startswith("layers.0")]
    assert first.split() == [
        *("layers.0", "0.400", "->", "0.200", "0.200", "->", "0.100", "0.133", "->", "0.067"),
        *("0.600", "->", "0.800", "0.100", "->", "0.050"),
    ]
    assert "warning: calibrating moved 1 of 2 tasks" in text
    assert max(map(len, text.splitlines())) <= 100


def test_what_was_not_measured_has_no_column():
    plain = BlockDrift("layers.0", 0.9, 0.1, 17)
    drift = DriftReport.of({"mnist": {"merged": ModelDrift((plain,))}}, examples=16)

    text = drift_table(drift)

    assert text.splitlines()[1].split() == ["block", "drift", "cosine"]
    assert text.splitlines()[2].split() == ["layers.0", "0.100", "0.900"]
    assert "Frechet distance" not in drift_plot(drift)


@pytest.mark.parametrize("tasks", [{"mnist": (0.4, 0.2)}, {"mnist": (0.4, 0.2), "<s&n>": (0.2, 0.3)}])
def test_the_picture_is_svg_with_a_line_for_each_model(tasks):
    from xml.etree import ElementTree

    root = ElementTree.fromstring(drift_plot(drift_of(**tasks)))

    assert root.tag.endswith("svg")
    lines = [one for one in root.iter() if one.tag.endswith("polyline")]
    thick = [one for one in lines if one.get("stroke-width") == "2.5"]
    assert len(thick) == 5 * 2
    assert len(lines) - len(thick) == (0 if len(tasks) == 1 else 5 * 2 * 2)
    points = [
        float(number) for one in lines for pair in one.get("points").split() for number in pair.split(",")
    ]
    assert min(points) >= 0
    words = " ".join(one.text or "" for one in root.iter())
    assert "local mismatch" in words
    assert "Frechet distance" in words
