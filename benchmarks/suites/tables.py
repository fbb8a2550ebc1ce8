"""Entries as tables of Markdown: accuracies in percent, and shares of the experts'."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from benchmarks.suites.grid import Entry, Records
from benchmarks.suites.rows import CALIBRATORS, RULES

NAMES = {"none": "merged", "featcal": "FeatCal", "surgery": "Surgery", "prob_surgery": "ProbSurgery"}


def rules(records: Records) -> str:
    """Rule by rule: mean accuracy and, in brackets, the mean share of the experts', by calibrator."""
    experts = _scores(records, "references", "experts")
    found = {(entry.row, entry.calibrator): entry for entry in records.of("rules")}
    lines = [
        "| rule | searched | " + " | ".join(NAMES.values()) + " |",
        "| --- | --- |" + " ---: |" * len(NAMES),
    ]
    for name in ("base", "experts", "joint model"):
        if (scores := _scores(records, "references", name)) is not None:
            lines.append(f"| {name} | | {_cell(scores, experts)} |" + " |" * len(CALIBRATORS))
    for row in RULES:
        if (row.label, "none") in found:
            settings = found[row.label, "none"].settings
            searched = ", ".join(f"{key} {value}" for key, value in settings.items() if key in row.sweep)
            cells = [found.get((row.label, name)) for name in NAMES]
            texts = ["" if cell is None else _cell(cell.scores, experts) for cell in cells]
            lines.append(f"| {row.label} | {searched} | " + " | ".join(texts) + " |")
    return "\n".join(lines) + "\n"


def per_task(records: Records, table: str, entries: Sequence[tuple[str, str]] = ()) -> str:
    """One row an entry, one column a task; `entries` (row, calibrator) choose, else all there are."""
    experts = _scores(records, "references", "experts")
    assert experts is not None
    lines = [
        "| | " + " | ".join(experts) + " | mean | of experts | s |",
        "| --- |" + " ---: |" * (len(experts) + 3),
    ]
    if not entries:
        for name in ("base", "experts", "joint model"):
            if (scores := _scores(records, "references", name)) is not None:
                lines.append(_line(name, scores, experts, None))
    for entry in records.of(table):
        if not entries or (entry.row, entry.calibrator) in entries:
            label = entry.row + ("" if entry.calibrator == "none" else f" + {NAMES[entry.calibrator]}")
            lines.append(_line(label, entry.scores, experts, entry.seconds))
    return "\n".join(lines) + "\n"


def tuned(records: Records) -> str:
    """FeatCal on each rule with the settings that were found: mean accuracy, and share of the experts'."""
    experts = _scores(records, "references", "experts")
    lines = ["| on | judged by | settings | FeatCal |", "| --- | --- | --- | ---: |"]
    for table, judge in (("tuned", "validation examples"), ("tuned without labels", "features")):
        for entry in records.of(table):
            settings = ", ".join(f"{name} {value:g}" for name, value in entry.settings.items())
            lines.append(f"| {entry.row} | {judge} | {settings} | {_cell(entry.scores, experts)} |")
    return "\n".join(lines) + "\n"


def spread(records: Records, table: str) -> str:
    """Mean and standard deviation over seeds of the mean accuracy, by row and calibrator."""
    seen: dict[tuple[str, str], list[Entry]] = {}
    for entry in records.of(table):
        seen.setdefault((entry.row, entry.calibrator), []).append(entry)
    lines = ["| | seeds | mean | standard deviation |", "| --- | ---: | ---: | ---: |"]
    for (row, calibrator), entries in seen.items():
        means = [100 * statistics.mean(entry.scores.values()) for entry in entries]
        deviation = f"{statistics.stdev(means):.2f}" if len(means) > 1 else ""
        label = row + ("" if calibrator == "none" else f" + {NAMES[calibrator]}")
        lines.append(f"| {label} | {len(means)} | {statistics.mean(means):.1f} | {deviation} |")
    return "\n".join(lines) + "\n"


def share(scores: Mapping[str, float], experts: Mapping[str, float]) -> float:
    """Mean over tasks of the score divided by the expert's, in percent."""
    return 100 * statistics.mean(scores[task] / experts[task] for task in experts)


def _scores(records: Records, table: str, row: str) -> Mapping[str, float] | None:
    entry = records.entries.get((table, row, "none", 0))
    return None if entry is None else entry.scores


def _cell(scores: Mapping[str, float], experts: Mapping[str, float] | None) -> str:
    mean = statistics.mean(100 * score for score in scores.values())
    return f"{mean:.1f}" if experts is None else f"{mean:.1f} ({share(scores, experts):.1f})"


def _line(
    label: str, scores: Mapping[str, float], experts: Mapping[str, float], seconds: float | None
) -> str:
    numbers = [100 * scores[task] for task in experts]
    cells = [f"{number:.1f}" for number in (*numbers, statistics.mean(numbers), share(scores, experts))]
    return "| " + " | ".join([label, *cells, "" if seconds is None else f"{seconds:.0f}"]) + " |"
