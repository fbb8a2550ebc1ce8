"""Scores of a task side by side, and what can be derived from them."""

from __future__ import annotations

from collections.abc import Iterable

from pydantic import Field

from merging.report.entry import Entry

AVERAGING = "unweighted mean over tasks; ratios are taken per task first, then averaged"


class FourScores(Entry):
    """One number for each kind of model; None where it was not measured."""

    base: float | None = None
    expert: float | None = None
    merged: float | None = None
    calibrated: float | None = None


class TaskReport(Entry):
    """What was measured on one task. Use `TaskReport.of`, which derives the ratios."""

    metric: str = "accuracy"
    lower_is_better: bool = Field(default=False, description="As of a perplexity.")
    scores: FourScores = Field(description="As measured.")
    normalised: FourScores = Field(
        description="Divided by the expert's score; the expert's divided by it where lower is better."
    )
    recovered: float | None = Field(default=None, description="(calibrated - merged) / (expert - merged).")
    recovered_note: str = Field(default="", description="Why `recovered` is missing.")
    test_examples: int = 0
    calibration_asked: int | None = Field(default=None, description="None: all there are.")
    calibration_used: int = 0
    overlap: int = Field(
        default=0, description="Test examples that are also calibration examples, of any task, by content."
    )
    fingerprints: dict[str, str] = Field(default_factory=dict, description="Split -> hash of its examples.")

    @classmethod
    def of(
        cls,
        *,
        metric: str = "accuracy",
        lower_is_better: bool = False,
        base: float | None = None,
        expert: float | None = None,
        merged: float | None = None,
        calibrated: float | None = None,
        test_examples: int = 0,
        calibration_asked: int | None = None,
        calibration_used: int = 0,
        overlap: int = 0,
        fingerprints: dict[str, str] | None = None,
    ) -> TaskReport:
        scores = FourScores(base=base, expert=expert, merged=merged, calibrated=calibrated)
        share, note = recovered(scores, lower_is_better=lower_is_better)
        return cls(
            metric=metric,
            lower_is_better=lower_is_better,
            scores=scores,
            normalised=normalised(scores, lower_is_better=lower_is_better),
            recovered=share,
            recovered_note=note,
            test_examples=test_examples,
            calibration_asked=calibration_asked,
            calibration_used=calibration_used,
            overlap=overlap,
            fingerprints=fingerprints or {},
        )


class Means(Entry):
    """Over the tasks that have the number; `tasks` counts those that enter each column of `scores`."""

    averaging: str = AVERAGING
    scores: FourScores = FourScores()
    normalised: FourScores = FourScores()
    recovered: float | None = None
    recovered_tasks: int = Field(default=0, description="How many tasks have a gap to recover.")


def normalised(scores: FourScores, *, lower_is_better: bool = False) -> FourScores:
    """Each score as a share of the expert's, so that more is better; None where the expert's is missing or
    not positive."""
    expert = scores.expert
    if expert is None or expert <= 0:
        return FourScores()

    def ratio(value: float | None) -> float | None:
        if value is None or (lower_is_better and value <= 0):
            return None
        return expert / value if lower_is_better else value / expert

    return FourScores(**{kind: ratio(value) for kind, value in scores.model_dump().items()})


def recovered(scores: FourScores, *, lower_is_better: bool = False) -> tuple[float | None, str]:
    """(calibrated - merged) / (expert - merged), or None and the reason."""
    if scores.calibrated is None or scores.merged is None or scores.expert is None:
        return None, "not all of expert, merged and calibrated were measured"
    gap = scores.expert - scores.merged
    if (gap >= 0) if lower_is_better else (gap <= 0):
        return None, "no gap: the merged model is as good as the expert"
    return (scores.calibrated - scores.merged) / gap, ""


def means(tasks: Iterable[TaskReport]) -> Means:
    """A column has a mean only if every task has the number, so that columns can be compared; scores have one
    only if all tasks count them alike."""
    tasks = tuple(tasks)
    alike = len({task.lower_is_better for task in tasks}) <= 1
    shares = [task.recovered for task in tasks if task.recovered is not None]
    return Means(
        scores=_columns([task.scores for task in tasks]) if alike else FourScores(),
        normalised=_columns([task.normalised for task in tasks]),
        recovered=_mean(shares),
        recovered_tasks=len(shares),
    )


def _columns(rows: list[FourScores]) -> FourScores:
    columns = {kind: [getattr(row, kind) for row in rows] for kind in FourScores.model_fields}
    return FourScores(**{kind: None if None in values else _mean(values) for kind, values in columns.items()})


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None
