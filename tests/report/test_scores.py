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


def test_where_lower_is_better_ratios_and_gaps_turn_round():
    report = TaskReport.of(
        metric="perplexity", lower_is_better=True, base=40.0, expert=10.0, merged=20.0, calibrated=12.5
    )

    assert report.normalised == FourScores(base=0.25, expert=1.0, merged=0.5, calibrated=0.8)
    assert report.recovered == pytest.approx(0.75)
    assert TaskReport.of(
        lower_is_better=True, expert=10.0, merged=9.0, calibrated=8.0
    ).recovered_note.startswith("no gap")


def test_scores_that_count_differently_have_no_mean_but_their_ratios_do():
    found = means(
        [TaskReport.of(expert=0.8, merged=0.4), TaskReport.of(lower_is_better=True, expert=10.0, merged=20.0)]
    )

    assert found.scores == FourScores()
    assert found.normalised == FourScores(expert=1.0, merged=0.5)
