from __future__ import annotations

from merging.report.report import Report
from merging.report.scores import TaskReport
from merging.report.table import WIDTH, markdown, render


def test_every_task_and_the_mean_have_a_row(report):
    lines = render(report).splitlines()

    assert lines[1].split() == [
        "task",
        "base",
        "expert",
        "merged",
        "calibrated",
        "merged",
        "calibrated",
        "recovered",
        "tests",
    ]
    assert lines[3].split() == ["mnist", "10.0", "90.0", "50.0", "80.0", "55.6", "88.9", "75.0", "500"]
    assert lines[6].split() == ["mean", "of", "2", "15.0", "85.0", "45.0", "70.0", "52.8", "81.9", "62.5"]
    assert "unweighted mean over tasks" in lines[7]


def test_drift_solves_parameters_and_cost_have_a_line_each(report):
    text = " ".join(render(report).split())

    assert "last block 0.60 -> 0.30 (cosine 0.900 -> 0.900)" in text
    assert (
        "solves: 2, 0 by a fallback, 0 with fewer tokens than features; largest condition inf (layers.0.fc2)"
        in text
    )
    assert "parameters: 1 calibrated, 1 merged only, 1 copied from the base" in text
    assert "1: outside the blocks" in text
    assert "merge 1.5 s, 1.00 GiB" in text
    assert "warning: 1 of 2 solves are ill-conditioned" in text


def test_it_fits_a_hundred_columns(report):
    long = {"a_task_with_a_name_that_never_ends_" * 3: report.tasks["mnist"], "svhn": report.tasks["svhn"]}

    text = render(_with(report, long))

    assert max(map(len, text.splitlines())) <= WIDTH
    assert "a_task_with_a_name_..." in text


def test_columns_without_numbers_are_left_out():
    merged_only = Report.of(tasks={"mnist": TaskReport.of(base=0.1, merged=0.5, test_examples=5)})

    assert render(merged_only).splitlines()[1].split() == ["task", "base", "merged", "tests"]


def test_a_report_without_scores_still_says_the_rest(report):
    text = render(_with(report, {}))

    assert text.startswith("drift from the experts")


def test_what_inference_needs_is_said(report):
    text = render(report.model_copy(update={"inference_note": "the task must be known"}))

    assert text.endswith("note: the task must be known")


def test_markdown_shows_names_as_they_are(report):
    text = markdown(_with(report, {"<b>a|b</b>": report.tasks["mnist"]}))

    assert "| &lt;b>a\\|b&lt;/b> | 10.0 |" in text
    assert "| task | base | expert | merged | calibrated | of expert: merged |" in text


def _with(report, tasks):
    return report.model_copy(update={"tasks": tasks})


def test_a_perplexity_is_no_percentage():
    tasks = {
        "mnli": TaskReport.of(expert=0.8, merged=0.6, test_examples=10),
        "wiki": TaskReport.of(
            metric="perplexity",
            lower_is_better=True,
            base=9.0,
            expert=12.5,
            merged=20.0,
            calibrated=25.0,
            test_examples=10,
        ),
    }

    report = Report.of(tasks=tasks)

    text = render(report)
    assert "12.50" in text
    assert "lower is better: wiki" in text
    assert "lower is better: wiki" in markdown(report)
    assert any('expert "wiki" (wiki) is worse than the base' in one for one in report.warnings)
    assert any("made it worse, from 20.00 to 25.00" in one for one in report.warnings)
    assert not any("mnli" in one for one in report.warnings)


def test_warnings_are_counted_in_the_summary(report):
    text = " ".join(render(report).split())

    assert f"warnings: {len(report.warnings)}, see below" in text
    assert "warnings:" not in render(report.model_copy(update={"warnings": ()}))
