"""What was measured on a suite, as a section of docs/results.md with its figures."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.plot import curves
from benchmarks.section import Section, write_section
from benchmarks.suites import tables
from benchmarks.suites.experiments import (
    COUNTS,
    LATER_ANCHORS,
    PRECISIONS,
    ROUNDS,
    SAMPLES,
    SHARES,
    SWEEP_EXAMPLES,
    SWEEPS,
    TRIED,
    tuned_round,
)
from benchmarks.suites.grid import Entry, Records
from benchmarks.suites.stamps import stamps

ABOUT = (
    "Accuracy on test examples, mean over tasks, in percent; in brackets the mean share of the task's "
    'expert\'s. Settings under "searched" did best on validation examples; all others are defaults. Surgery '
    "and ProbSurgery are told the task of every test example, and keep parameters for each."
)
LINES = (
    ("average + FeatCal", "average", "featcal"),
    ("Chain of Merges", "Chain of Merges", "none"),
    ("Chain of Merges + FeatCal", "Chain of Merges", "featcal"),
)
HEADLINE = tuple(
    (row, calibrator)
    for row in ("average", "Task Arithmetic", "TIES", "RegMean", "RegMean++", "Chain of Merges")
    for calibrator in ("none", "featcal")
)


def write(page: Path, title: str, measured: Path) -> None:
    """Put the section in its place on the page; figures lie in `figures` beside it."""
    records = Records(measured / "records.jsonl")
    stem = title.replace(" ", "-").replace(",", "")
    body = [*_rules(records), *_experiments(records, page.parent / "figures", stem)]
    shift = measured / "shift.json"
    if shift.exists():
        body += _shift(json.loads(shift.read_text(encoding="utf-8")), page.parent / "figures", stem)
    cosines = measured / "cosines.json"
    if cosines.exists():
        body += _cosines(json.loads(cosines.read_text(encoding="utf-8")))
    made = stamps(measured)
    facts = dict.fromkeys(line for one in made for line in (one.machine, one.versions))
    write_section(page, Section(title, "\n".join(one.told for one in made), list(facts), body))


def _rules(records: Records) -> list[str]:
    body = []
    if records.of("rules"):
        body += [ABOUT, tables.rules(records), "By task:", tables.per_task(records, "rules", HEADLINE)]
    if records.of("seeds"):
        body += ["Over draws of calibration examples, on the same experts (defaults, no search):"]
        body += [tables.spread(records, "seeds")]
    if records.of("ablation"):
        body += ["Chain of Merges, part after part:", tables.per_task(records, "ablation")]
    return body


def _experiments(records: Records, figures: Path, stem: str) -> list[str]:
    body = []
    lines = {
        label: [(float(n), _mean(records, f"samples {n}", row, calibrator)) for n in SAMPLES]
        for label, row, calibrator in LINES
        if (f"samples {SAMPLES[-1]}", row, calibrator, 0) in records.entries
    }
    if lines:
        figure = curves("Accuracy", "calibration examples a task", "%", lines, powers=True)
        body.append(_figure(figures, f"{stem}-samples", figure, "accuracy by calibration examples"))
        body.append(_numbers("examples a task", list(map(str, SAMPLES)), lines))
    others: tuple[tuple[str, str, Sequence[float]], ...] = (
        ("experts at this share of their way from the base", "share", SHARES),
        ("the first tasks alone", "tasks", COUNTS),
    )
    for what, prefix, points_at in others:
        body += _with_experts(records, what, {f"{value:g}": f"{prefix} {value:g}" for value in points_at})
    calibrated = [(label, row) for label, row, calibrator in LINES if calibrator == "featcal"]
    rounds = {
        label: [(float(n), _mean(records, f"rounds {n}", row, "featcal")) for n in ROUNDS]
        for label, row in calibrated
        if (f"rounds {ROUNDS[-1]}", row, "featcal", 0) in records.entries
    }
    if rounds:
        body.append(_numbers("rounds of FeatCal", list(map(str, ROUNDS)), rounds))
    if records.of("tuned") or records.of("tuned without labels"):
        body += [
            f"FeatCal with the best settings of {_tried()}, judged by the task's metric on validation "
            "examples, or without labels by the features of calibration examples that were held out:"
        ]
        body += [tables.tuned(records)]
    body += _tuned_rounds(records)
    precisions = [
        one
        for one in PRECISIONS
        if all((f"precision {one}", row, calibrator, 0) in records.entries for _, row, calibrator in LINES)
    ]
    if precisions:
        rows = {
            label: [(0.0, _mean(records, f"precision {one}", row, calibrator)) for one in precisions]
            for label, row, calibrator in LINES
        }
        body.append(_numbers("`precision`", precisions, rows, digits=2))
    for setting, values in SWEEPS.items():
        known = [
            value for value in values if (f"{setting} {value:g}", "average", "featcal", 0) in records.entries
        ]
        if known:
            points = [
                (value, _mean(records, f"{setting} {value:g}", "average", "featcal")) for value in known
            ]
            body.append(
                _numbers(
                    f"FeatCal on the average, {SWEEP_EXAMPLES} examples, `{setting}`",
                    [f"{v:g}" for v in known],
                    {"mean": points},
                )
            )
    kinds = sorted(
        {entry.table for entry in records.entries.values() if entry.table.startswith("corruption ")}
    )
    if kinds:
        names = ("featcal", "surgery", "prob_surgery")
        rows = {
            tables.NAMES[name]: [(0.0, _mean(records, kind, "average", name)) for kind in kinds]
            for name in names
            if all((kind, "average", name, 0) in records.entries for kind in kinds)
        }
        body.append(
            _numbers("calibration examples with", [kind.removeprefix("corruption ") for kind in kinds], rows)
        )
    return body


def _tuned_rounds(records: Records) -> list[str]:
    rows = {}
    for label, row, calibrator in LINES:
        for anchor in LATER_ANCHORS:
            names = ("tuned", *(tuned_round(anchor, number) for number in ROUNDS[1:]))
            if calibrator == "featcal" and all(
                (name, row, calibrator, 0) in records.entries for name in names
            ):
                points = [(0.0, _mean(records, name, row, calibrator)) for name in names]
                rows[f"{label}, later `anchor` {anchor:g}"] = points
    return [_numbers("rounds with those settings", list(map(str, ROUNDS)), rows)] if rows else []


def _tried() -> str:
    return " and ".join(
        f"`{name}` {', '.join(f'{one:g}' for one in values)}" for name, values in TRIED.items()
    )


def _with_experts(records: Records, what: str, named: Mapping[str, str]) -> list[str]:
    """A table over other experts than the suite's: `named`, heads of its columns -> tables of the records."""
    last = LINES[-1][1:]
    known = {head: table for head, table in named.items() if (table, *last, 0) in records.entries}
    if not known:
        return []
    lines = [f"| {what} | {' | '.join(known)} |", "| --- |" + " ---: |" * len(known)]
    for label, row, calibrator in (
        ("experts", "experts", "none"),
        ("average", "average", "none"),
        *LINES,
    ):
        cells = []
        for table in known.values():
            experts = records.entries[table, "experts", "none", 0].scores
            share = tables.share(records.entries[table, row, calibrator, 0].scores, experts)
            cells.append(f"{_mean(records, table, row, calibrator):.1f} ({share:.1f})")
        lines.append(f"| {label} | {' | '.join(cells)} |")
    return ["\n".join(lines)]


def _shift(found: Mapping[str, Sequence[float]], figures: Path, stem: str) -> list[str]:
    lines = {
        label: [(float(n + 1), value) for n, value in enumerate(values)] for label, values in found.items()
    }
    figure = curves("Merging Covariate Shift", "block", "W2 / rms", lines)
    told = "distance of each block's output from the expert's"
    blocks = list(map(str, range(1, 1 + len(next(iter(found.values()))))))
    return [
        "Merging Covariate Shift: the 2-Wasserstein distance between Gaussians, over the root mean square of "
        "the expert's outputs, on validation examples, mean over tasks:",
        _figure(figures, f"{stem}-shift", figure, told),
        _numbers("block", blocks, lines, digits=2),
    ]


def _cosines(found: Mapping[str, Mapping[str, float]]) -> list[str]:
    tasks = list(next(iter(found.values())))
    rows = {label: [(0.0, by_task[task]) for task in tasks] for label, by_task in found.items()}
    return [
        "Cosine between what the merged model and what each expert differs by from the base:",
        _numbers("model", tasks, rows, digits=3),
    ]


def _mean(records: Records, table: str, row: str, calibrator: str) -> float:
    entry: Entry = records.entries[table, row, calibrator, 0]
    return statistics.mean(100 * score for score in entry.scores.values())


def _numbers(
    what: str, heads: Sequence[str], rows: Mapping[str, Sequence[tuple[float, float]]], *, digits: int = 1
) -> str:
    lines = [f"| {what} | {' | '.join(heads)} |", "| --- |" + " ---: |" * len(heads)]
    lines += [
        f"| {label} | {' | '.join(f'{y:.{digits}f}' for _, y in points)} |" for label, points in rows.items()
    ]
    return "\n".join(lines)


def _figure(folder: Path, name: str, text: str, said: str) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.svg").write_text(text, encoding="utf-8")
    return f"![{said}](figures/{name}.svg)"
