from __future__ import annotations

import pytest

from merging.report.scores import FourScores, TaskReport, means, normalised, recovered


def test_ratios_are_to_the_expert():
    ratios = normalised(FourScores(base=0.2, expert=0.8, merged=0.4, calibrated=0.8))

    assert ratios == FourScores(base=0.25, expert=1.0, merged=0.5, calibrated=1.0)


@pytest.mark.parametrize("expert", [None, 0.0])
def test_no_ratio_without_an_experts_score(expert):
    assert normalised(FourScores(base=0.2, expert=expert, merged=0.4)) == FourScores()


def test_recovered_is_the_share_of_the_gap():
    assert recovered(FourScores(expert=0.9, merged=0.5, calibrated=0.8)) == (pytest.approx(0.75), "")
    assert recovered(FourScores(expert=0.9, merged=0.5, calibrated=0.4))[0] == pytest.approx(-0.25)


def test_recovered_says_why_it_is_missing():
    assert recovered(FourScores(expert=0.9, merged=0.5)) == (
        None,
        "not all of expert, merged and calibrated were measured",
    )
    assert recovered(FourScores(expert=0.5, merged=0.5, calibrated=0.8))[1].startswith("no gap")


def test_mean_of_ratios_is_not_ratio_of_means():
    tasks = [
        TaskReport.of(expert=1.0, merged=0.5, calibrated=0.75),
        TaskReport.of(expert=0.5, merged=0.5, calibrated=0.5),
    ]

    found = means(tasks)

    assert found.scores.merged == 0.5
    assert found.normalised.merged == 0.75
    assert (found.recovered, found.recovered_tasks) == (0.5, 1)
    assert "unweighted" in found.averaging


def test_a_column_with_holes_has_no_mean():
    found = means([TaskReport.of(base=0.5, expert=1.0), TaskReport.of(expert=0.5)])

    assert found.scores == FourScores(expert=0.75)
    assert means([]).scores == FourScores()
