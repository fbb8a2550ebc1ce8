"""Findings: what a run's numbers warn of, each with what to do next."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from merging.report.drift import DriftReport
from merging.report.harm import harm_finding
from merging.report.scores import TaskReport
from merging.report.solver import UNSEEN, ParameterFate, SolverRow

_SHOWN = 4  # names of modules in one sentence

ILL_CONDITIONED = 1e10
"""Above this a float64 solve keeps fewer than six digits."""


def findings(
    tasks: Mapping[str, TaskReport],
    solver: Sequence[SolverRow],
    experts: Mapping[str, str],
    parameters: Mapping[str, ParameterFate] = MappingProxyType({}),
    drift: DriftReport | None = None,
) -> tuple[str, ...]:
    """One sentence each. `experts`: task -> where the expert came from."""
    found: list[str] = []
    for task, report in tasks.items():
        found += _of_task(task, report, experts.get(task, task))
    if drift is not None and (harm := harm_finding(drift)) is not None:
        found.append(harm)
    return (*found, *_of_solver(solver), *_of_parameters(parameters))


def _of_task(task: str, report: TaskReport, expert: str) -> list[str]:
    found = []
    scores = report.scores
    sign = -1 if report.lower_is_better else 1
    if scores.base is not None and scores.expert is not None and sign * (scores.expert - scores.base) < 0:
        found.append(
            f'expert "{task}" ({expert}) is worse than the base on its own task, '
            f"{_shown(report, scores.expert)} against {_shown(report, scores.base)}: it was bad before "
            "merging. Check the checkpoint and the head, or leave it out."
        )
    both = scores.merged is not None and scores.calibrated is not None
    if both and sign * (scores.calibrated - scores.merged) < 0:  # type: ignore[operator]
        found.append(
            f'task "{task}": calibrating made it worse, from {_shown(report, scores.merged)} to '
            f"{_shown(report, scores.calibrated)}. Use more calibration examples, or keep merged/."
        )
    if report.overlap:
        found.append(
            f'task "{task}": {report.overlap} of {report.test_examples} test examples are also calibration '
            "examples, so its score may flatter. Draw the two from different splits."
        )
    return found


def _of_parameters(parameters: Mapping[str, ParameterFate]) -> list[str]:
    unseen = [name for name, fate in parameters.items() if fate.reason == UNSEEN]
    if not unseen:
        return []
    modules = list(dict.fromkeys(name.rpartition(".")[0] for name in unseen))
    shown = ", ".join(modules[:_SHOWN]) + (
        f" and {len(modules) - _SHOWN} more" if len(modules) > _SHOWN else ""
    )
    return [
        f"no token of the calibration examples reached {shown}: not calibrated (n = 0), what was merged "
        "stays. Use more, or other, calibration examples."
    ]


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


def _shown(report: TaskReport, value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.2f}" if report.lower_is_better else f"{100 * value:.1f}%"
