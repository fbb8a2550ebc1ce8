"""A report for people: plain text for the terminal, 100 columns wide at most, and the same as Markdown."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Callable

from merging.report.curve import curve_lines, curve_markdown
from merging.report.drift import mean_of
from merging.report.escaping import escaped
from merging.report.report import Report
from merging.report.scores import AVERAGING, FourScores

WIDTH = 100
_NAME = 22  # the widest column of task names

_COLUMNS: tuple[tuple[str, str, Callable[[FourScores, FourScores, float | None], float | None]], ...] = (
    ("score", "base", lambda raw, ratio, share: raw.base),
    ("score", "expert", lambda raw, ratio, share: raw.expert),
    ("score", "merged", lambda raw, ratio, share: raw.merged),
    ("score", "calibrated", lambda raw, ratio, share: raw.calibrated),
    ("of expert", "merged", lambda raw, ratio, share: ratio.merged),
    ("of expert", "calibrated", lambda raw, ratio, share: ratio.calibrated),
    ("gap", "recovered", lambda raw, ratio, share: share),
)


def render(report: Report) -> str:
    """Scores, then a line each on drift, solves, parameters and cost, then what to beware of."""
    blocks = [
        ""
        if report.curve is None
        else "\n".join(_wrapped(line) for line in curve_lines(report.curve, WIDTH)),
        _score_table(report),
        "\n".join(_wrapped(line) for line in summary_lines(report)),
    ]
    notes = [f"warning: {one}" for one in report.warnings]
    if report.inference_note:
        notes.append(f"note: {report.inference_note}")
    blocks.append("\n".join(_wrapped(note) for note in notes))
    return "\n\n".join(block for block in blocks if block)


def markdown(report: Report) -> str:
    """The same, for a README."""
    parts = scores_markdown(report)
    if report.curve is not None:
        parts.append(f"{curve_markdown(report.curve)}\n\nSettings were chosen by {report.curve.meaning}.")
    for line in (*summary_lines(report), *(f"Warning: {one}" for one in report.warnings)):
        parts.append(escaped(line))
    if report.inference_note:
        parts.append(escaped(report.inference_note))
    return "\n\n".join(parts) + "\n"


def scores_markdown(report: Report) -> list[str]:
    """The table of scores and what its numbers are, as paragraphs; empty where nothing was scored."""
    groups, names, rows = score_rows(report)
    parts = []
    if rows:
        heads = [
            name if group == "score" else f"{group}: {name}"
            for group, name in zip(groups, names, strict=True)
        ]
        body = [[escaped(row[0]), *row[1:]] for row in rows]
        lines = [["task", *heads, "tests"], ["---", *["---:"] * (len(heads) + 1)], *body]
        parts.append("\n".join(f"| {' | '.join(line)} |" for line in lines))
        parts.append(f"In percent; {AVERAGING}.")
        parts += [escaped(line) for line in _about_units(report)]
    return parts


def score_rows(report: Report) -> tuple[list[str], list[str], list[list[str]]]:
    """Groups and names of the columns that have numbers, and a row of text per task and for the mean."""
    means = report.means
    plain = _lower_is_better(report)
    lines = [
        (task, (one.scores, one.normalised, one.recovered), str(one.test_examples), task in plain)
        for task, one in report.tasks.items()
    ]
    if len(lines) > 1:
        mean = (means.scores, means.normalised, means.recovered)
        lines.append((f"mean of {len(lines)}", mean, "", len(plain) == len(lines)))
    kept = [column for column in _COLUMNS if any(column[2](*values) is not None for _, values, *_ in lines)]
    if not kept:
        return [], [], []
    rows = [
        [
            task,
            *(_cell(value(*values), percent=not bare or group != "score") for group, _, value in kept),
            tests,
        ]
        for task, values, tests, bare in lines
    ]
    return [group for group, _, _ in kept], [name for _, name, _ in kept], rows


def summary_lines(report: Report) -> list[str]:
    """One line each on what there is to say of drift, solves, coefficients, parameters, cost and warnings."""
    lines = [
        _drift(report),
        _solves(report),
        _coefficients(report),
        _parameters(report),
        _cost(report),
        _warnings(report),
    ]
    return [line for line in lines if line]


def _score_table(report: Report) -> str:
    groups, names, rows = score_rows(report)
    if not rows:
        return ""
    first = min(_NAME, max(len("task"), *(len(row[0]) for row in rows)))
    heads = [*names, "tests"]
    widths = [len(head) + (3 if _starts(groups, place) else 2) for place, head in enumerate(heads)]
    above = "".join(
        (group if _starts(groups, place) else "").rjust(width)
        for place, (group, width) in enumerate(zip([*groups, ""], widths, strict=True))
    )
    lines = [
        f"{'in percent'.ljust(first)}{above}".rstrip(),
        "task".ljust(first) + "".join(head.rjust(width) for head, width in zip(heads, widths, strict=True)),
    ]
    for row in rows:
        cells = "".join(cell.rjust(width) for cell, width in zip(row[1:], widths, strict=True))
        lines.append((_shortened(row[0], first) + cells).rstrip())
    rule = "-" * len(lines[1])
    body = [lines[0], lines[1], rule, *lines[2:]]
    if len(rows) > 1:
        body[-1:] = [rule, body[-1], _wrapped(f"mean: {AVERAGING}")]
    return "\n".join([*body, *(_wrapped(line) for line in _about_units(report))])


def _about_units(report: Report) -> list[str]:
    """Which scores are no shares."""
    names = _lower_is_better(report)
    return [f"scores as they are, lower is better: {', '.join(names)}"] if names else []


def _starts(groups: list[str], place: int) -> bool:
    """Whether the column is the first of its group, and so is set apart from the one before."""
    return place >= len(groups) or place == 0 or groups[place] != groups[place - 1]


def _drift(report: Report) -> str:
    rows = [row for row in report.drift.mean if row.merged is not None or row.calibrated is not None]
    if not rows:
        return ""
    parts = []
    for name, row in (("first", rows[0]), ("middle", rows[len(rows) // 2]), ("last", rows[-1])):
        seen = [one for one in (row.merged, row.calibrated) if one is not None]
        parts.append(
            f"{name} block {' -> '.join(f'{one.distance:.2f}' for one in seen)} "
            f"(cosine {' -> '.join(f'{one.cosine:.3f}' for one in seen)})"
        )
    outputs = [(one.merged, one.calibrated) for one in report.drift.output.values()]
    means = [mean_of(column) for column in zip(*outputs, strict=True)] if outputs else []
    known = [one for one in means if one is not None]
    if known:
        parts.append(
            f"final features {' -> '.join(f'{one.distance:.2f}' for one in known)} "
            f"(cosine {' -> '.join(f'{one.cosine:.3f}' for one in known)})"
        )
    return f"drift from the experts: {'; '.join(dict.fromkeys(parts))}"


def _solves(report: Report) -> str:
    if not report.solver:
        return ""
    condition = max(report.solver, key=lambda row: row.condition)
    fallen = sum(bool(row.fallback) for row in report.solver)
    short = sum(row.short_of_tokens for row in report.solver)
    return (
        f"solves: {len(report.solver)}, {fallen} by a fallback, {short} with fewer tokens than features; "
        f"{_smallest_rank(report)}"
        f"largest condition {condition.condition:.1e} ({condition.module}), "
        f"largest residual {max(row.residual for row in report.solver):.1e}"
    )


def _smallest_rank(report: Report) -> str:
    """Where some solve tells fewer directions apart than it has features."""
    row = min(report.solver, key=lambda row: row.rank / max(1, row.features))
    if not 0 < row.rank < row.features:
        return ""
    return f"smallest rank {row.rank} of {row.features} ({row.module}), "


def _coefficients(report: Report) -> str:
    """Each expert's mean and range over the tensors."""
    found: dict[str, list[float]] = {}
    for row in report.coefficients.values():
        for task, value in row.items():
            found.setdefault(task, []).append(value)
    parts = []
    for task, values in found.items():
        spread = f" ({min(values):.3f} to {max(values):.3f})" if len(values) > 1 else ""
        parts.append(f"{task} {sum(values) / len(values):.3f}{spread}")
    return f"learned coefficients: {', '.join(parts)}" if parts else ""


def _parameters(report: Report) -> str:
    states: Counter[str] = Counter(fate.state for fate in report.parameters.values())
    if not states:
        return ""
    reasons = Counter(fate.reason for fate in report.parameters.values() if fate.reason)
    named = {"solved": "calibrated", "merged": "merged only", "copied": "copied from the base"}
    counts = ", ".join(f"{states[state]} {name}" for state, name in named.items() if states[state])
    why = "; ".join(f"{count}: {reason}" for reason, count in reasons.items())
    return f"parameters: {counts} ({why})" if why else f"parameters: {counts}"


def _cost(report: Report) -> str:
    if not report.stages:
        return ""
    parts = [f"{one.name} {one.seconds:.1f} s, {one.peak_bytes / 2**30:.2f} GiB" for one in report.stages]
    return (
        f"time and peak memory: {'; '.join(parts)}; {sum(one.seconds for one in report.stages):.1f} s in all"
    )


def _warnings(report: Report) -> str:
    count = len(report.warnings)
    return f"warnings: {count}, see below" if count else ""


def _cell(value: float | None, *, percent: bool) -> str:
    if value is None:
        return "-"
    return f"{100 * value:.1f}" if percent else f"{value:.2f}"


def _lower_is_better(report: Report) -> list[str]:
    return [task for task, one in report.tasks.items() if one.lower_is_better]


def _shortened(name: str, width: int) -> str:
    name = " ".join(name.split())
    return name.ljust(width) if len(name) <= width else f"{name[: width - 3]}..."


def _wrapped(line: str) -> str:
    return textwrap.fill(line, WIDTH, subsequent_indent="  ", break_on_hyphens=False)
