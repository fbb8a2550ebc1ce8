"""Findings: what a run's numbers warn of, each with what to do next."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from merging.report.scores import TaskReport
from merging.report.solver import SolverRow

ILL_CONDITIONED = 1e10
"""Above this a float64 solve keeps fewer than six digits."""


def findings(
    tasks: Mapping[str, TaskReport], solver: Sequence[SolverRow], experts: Mapping[str, str]
) -> tuple[str, ...]:
    """One sentence each. `experts`: task -> where the expert came from."""
    found: list[str] = []
    for task, report in tasks.items():
        found += _of_task(task, report, experts.get(task, task))
    return (*found, *_of_solver(solver))


def _of_task(task: str, report: TaskReport, expert: str) -> list[str]:
    found = []
    scores = report.scores
    if scores.base is not None and scores.expert is not None and scores.expert < scores.base:
        found.append(
            f'expert "{task}" ({expert}) is worse than the base on its own task, '
            f"{_percent(scores.expert)} against {_percent(scores.base)}: it was bad before merging. "
            "Check the checkpoint and the head, or leave it out."
        )
    if scores.merged is not None and scores.calibrated is not None and scores.calibrated < scores.merged:
        found.append(
            f'task "{task}": calibrating made it worse, from {_percent(scores.merged)} to '
            f"{_percent(scores.calibrated)}. Use more calibration examples, or keep merged/."
        )
    if report.overlap:
        found.append(
            f'task "{task}": {report.overlap} of {report.test_examples} test examples are also calibration '
            "examples, so its score may flatter. Draw the two from different splits."
        )
    return found


def _of_solver(solver: Sequence[SolverRow]) -> list[str]:
    found = []
    short = [row for row in solver if row.short_of_tokens]
    if short:
        worst = min(short, key=lambda row: row.tokens / row.features)
        found.append(
            f"{len(short)} of {len(solver)} solves saw fewer tokens than features; worst: {worst.module} "
            f"with {worst.tokens} tokens for {worst.features} features. Use more calibration examples."
        )
    ill = [row for row in solver if not row.condition < ILL_CONDITIONED]
    if ill:
        worst = max(ill, key=lambda row: row.condition)
        found.append(
            f"{len(ill)} of {len(solver)} solves are ill-conditioned; worst: {worst.module} with "
            f"{worst.condition:.0e}. Use more calibration examples or a stronger ridge."
        )
    fallen = [row for row in solver if row.fallback]
    if fallen:
        first = fallen[0]
        found.append(f"{len(fallen)} of {len(solver)} solves fell back: {first.module}, {first.fallback}.")
    return found


def _percent(value: float) -> str:
    return f"{100 * value:.1f}%"
