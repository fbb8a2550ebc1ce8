"""harm: tasks that calibrating has moved away from their expert, by what was measured without labels."""

from __future__ import annotations

from merging.report.drift import DriftReport, OutputRow

MARGIN = 1.05
"""Final features that are so many times as far from the expert's as before count as harmed: less is noise of
a few examples."""

_SHOWN = 4  # tasks in one sentence


def harmed(drift: DriftReport) -> dict[str, OutputRow]:
    """Task -> its final features before and after, where these are farther from the expert's afterwards, on
    average and for most examples."""
    return {task: row for task, row in drift.output.items() if _is_harmed(row)}


def harm_finding(drift: DriftReport) -> str | None:
    """One sentence with the tasks, the numbers and what to do; None where nothing was harmed."""
    tasks = harmed(drift)
    if not tasks:
        return None
    worst = sorted(tasks, key=lambda task: -_growth(tasks[task]))
    shown = "; ".join(_told(task, drift) for task in worst[:_SHOWN])
    more = f"; and {len(worst) - _SHOWN} more" if len(worst) > _SHOWN else ""
    many = (
        "all of them" if len(tasks) == len(drift.output) > 1 else f"{len(tasks)} of {len(drift.output)} tasks"
    )
    return (
        f"calibrating moved {many} away from the expert, by final features, no labels used: {shown}{more}. "
        "Use more calibration examples, a larger ridge or an anchor nearer to 1, or another merge to start "
        "from; or keep merged/."
    )


def _is_harmed(row: OutputRow) -> bool:
    both = row.merged is not None and row.calibrated is not None
    return both and _growth(row) > MARGIN and 2 * row.farther > row.examples


def _growth(row: OutputRow) -> float:
    assert row.merged is not None
    assert row.calibrated is not None
    if row.merged.distance == 0:
        return float("inf") if row.calibrated.distance > 0 else 1.0
    return row.calibrated.distance / row.merged.distance


def _told(task: str, drift: DriftReport) -> str:
    row = drift.output[task]
    assert row.merged is not None
    assert row.calibrated is not None
    where = drift.measured_on.get(task, "examples")
    blocks = [
        one.block
        for one in drift.tasks.get(task, ())
        if one.merged and one.calibrated and one.calibrated.distance > MARGIN * one.merged.distance
    ]
    begins = f", from block {blocks[0]} on" if blocks else ""
    return (
        f'"{task}" {row.merged.distance:.3f} to {row.calibrated.distance:.3f} of the expert\'s length '
        f"(cosine {row.merged.cosine:.3f} to {row.calibrated.cosine:.3f}; farther on {row.farther} of "
        f"{row.examples} {where}{begins})"
    )
