"""Drift for people: a table for each task and for their mean, and one of the final features."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence

from merging.report.drift import Distance, DriftReport, DriftRow
from merging.report.harm import harm_finding

WIDTH = 100

_COLUMNS: tuple[tuple[str, str, Callable[[Distance], float | None]], ...] = (
    ("drift", ".3f", lambda one: one.distance),
    ("local", ".3f", lambda one: one.local),
    ("upstream", ".3f", lambda one: one.upstream),
    ("cosine", ".3f", lambda one: one.cosine),
    ("Frechet", ".3f", lambda one: one.frechet_relative),
)

LEGEND = (
    "before -> after calibrating. drift: |h - h_expert| / |h_expert|, mean over tokens; local: what the "
    "block itself adds, on the expert's own inputs; upstream: what it passes on from the blocks before it "
    "(as vectors, local and upstream add up to the drift); Frechet: 2-Wasserstein distance between the "
    "tokens as Gaussians, over the expert's root mean square."
)


def drift_table(drift: DriftReport) -> str:
    """Plain text, 100 columns wide as far as names of blocks allow."""
    if not drift.tasks:
        return "no drift was measured: no task has examples"
    parts = [
        f"{task}, on {_where(drift, task)}\n{_table(_heads(rows, 'block'), _blocks(rows))}"
        for task, rows in drift.tasks.items()
    ]
    if len(drift.tasks) > 1:
        count = len(drift.tasks)
        parts.append(f"mean of {count} tasks\n{_table(_heads(drift.mean, 'block'), _blocks(drift.mean))}")
    if drift.output:
        outputs = [
            DriftRow(block=task, merged=row.merged, calibrated=row.calibrated)
            for task, row in drift.output.items()
        ]
        parts.append(f"final features, which heads read\n{_table(_heads(outputs, 'task'), _blocks(outputs))}")
    parts.append(_wrapped(LEGEND))
    if (harm := harm_finding(drift)) is not None:
        parts.append(_wrapped(f"warning: {harm}"))
    return "\n\n".join(parts)


def _where(drift: DriftReport, task: str) -> str:
    known = drift.output.get(task)
    count = f"{known.examples}" if known is not None else f"up to {drift.examples}"
    return f"{count} {drift.measured_on.get(task, 'examples')}"


def _heads(rows: Sequence[DriftRow], first: str) -> list[str]:
    return [first, *(name for name, _, value in _COLUMNS if _known(rows, value))]


def _blocks(rows: Sequence[DriftRow]) -> list[list[str]]:
    columns = [(style, value) for _, style, value in _COLUMNS if _known(rows, value)]
    return [[row.block, *(_cell(row, style, value) for style, value in columns)] for row in rows]


def _known(rows: Sequence[DriftRow], value: Callable[[Distance], float | None]) -> bool:
    return any(
        one is not None and value(one) is not None for row in rows for one in (row.merged, row.calibrated)
    )


def _cell(row: DriftRow, style: str, value: Callable[[Distance], float | None]) -> str:
    found = [value(one) for one in (row.merged, row.calibrated) if one is not None]
    return " -> ".join("-" if one is None else format(one, style) for one in found)


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(line[column]) for line in (heads, *rows)) for column in range(len(heads))]
    lines = []
    for line in (heads, *rows):
        first, *rest = (
            cell.ljust(width) if number == 0 else cell.rjust(width)
            for number, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        lines.append("  ".join([first, *rest]).rstrip())
    return "\n".join(lines)


def _wrapped(text: str) -> str:
    return textwrap.fill(text, WIDTH, subsequent_indent="  ", break_on_hyphens=False)
