"""The curve of a search: what each point was worth on each task, and which was taken."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from pydantic import Field

from merging.report.entry import Entry

Criterion = Literal["features", "entropy", "validation"]

MEANING = {
    "features": "relative distance of final features to each task's expert, no labels used; lower is better",
    "entropy": "mean entropy of the predictions in nats, no labels used; lower is better",
    "validation": "score on the validation examples, a perplexity as its inverse; higher is better",
}


class CurvePoint(Entry):
    """One point that was tried."""

    values: dict[str, Any] = Field(description="Path in the spec -> value.")
    tasks: dict[str, float] = Field(default_factory=dict, description="Task -> what the point is worth.")
    mean: float | None = Field(default=None, description="Over the tasks; missing where the point failed.")
    note: str = Field(default="", description="Why it failed.")


class Curve(Entry):
    """All points that were tried, in order. The test examples had no part in it."""

    criterion: Criterion
    meaning: str
    examples: dict[str, int] = Field(description="Task -> how many examples each point was judged on.")
    judged_on: str = Field(description="Which examples these are.")
    points: tuple[CurvePoint, ...]
    best: dict[str, Any] = Field(description="The values that were taken: the first of the best points.")
    seconds: float = 0.0

    @property
    def at_an_end(self) -> tuple[str, ...]:
        """Swept numbers whose best value is the smallest or largest tried, where there were three or more."""
        ends = []
        for path, value in self.best.items():
            tried = sorted({point.values[path] for point in self.points if _is_number(point.values[path])})
            if len(tried) > 2 and _is_number(value) and value in (tried[0], tried[-1]):
                ends.append(path)
        return tuple(ends)


def curve_lines(curve: Curve, width: int) -> list[str]:
    """A table of the points; a column per task where they all fit, else only the mean."""
    tasks = list(dict.fromkeys(task for point in curve.points for task in point.tasks))
    tables = [_table(curve, tasks, arrow=True), _table(curve, [], arrow=True)]
    lines = next((table for table in tables if max(map(len, table)) <= width), tables[-1])
    count = sum(curve.examples.values())
    return [
        *lines,
        f"{len(curve.points)} points in {curve.seconds:.1f} s on {count} {curve.judged_on}: {curve.meaning}",
    ]


def curve_markdown(curve: Curve) -> str:
    """The same table in Markdown, every task in it."""
    tasks = list(dict.fromkeys(task for point in curve.points for task in point.tasks))
    heads, *rows = _cells(curve, tasks)
    lines = [heads, ["---:"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _table(curve: Curve, tasks: Sequence[str], *, arrow: bool) -> list[str]:
    cells = _cells(curve, tasks)
    widths = [max(len(row[column]) for row in cells) for column in range(len(cells[0]))]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in cells]
    marks = ["", *("  <- taken" if point.values == curve.best else "" for point in curve.points)]
    lines = [f"{line}{mark}" for line, mark in zip(lines, marks, strict=True)]
    return [lines[0], "-" * len(lines[0]), *lines[1:]]


def _cells(curve: Curve, tasks: Sequence[str]) -> list[list[str]]:
    rows = [[*curve.best, *tasks, "mean"]]
    for point in curve.points:
        worth = [point.tasks.get(task) for task in tasks]
        rows.append(
            [
                *(str(value) for value in point.values.values()),
                *("-" if one is None else _number(curve, one) for one in worth),
                "failed" if point.mean is None else _number(curve, point.mean),
            ]
        )
    return rows


def _number(curve: Curve, value: float) -> str:
    return f"{100 * value:.1f}" if curve.criterion == "validation" else f"{value:.4f}"


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
