"""Rows of a table in which contenders are compared, and where the time of one of them goes."""

from __future__ import annotations

import pstats
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.measure import BenchmarkError, Contender, Measurement, Runs, median, of_stage, once, ratio
from benchmarks.product import Product
from benchmarks.section import table

HEADS = ("", "wall s", "times", "user + system s", "peak MiB", "anonymous MiB", "mapped MiB", "remark")
_TOP = 8
_Times = dict[tuple[str, int, str], tuple[int, int, float, float, object]]


def comparison_rows(
    title: str, runs: Runs, to: str, remarks: Mapping[str, str] | None = None
) -> list[list[str]]:
    """A row a contender under the title; "times" is its wall time over that of `to`, round by round."""
    rows = [[f"**{title}**", *[""] * (len(HEADS) - 1)]]
    for label, several in runs.items():
        remark = (remarks or {}).get(label, "")
        if failures := [one.failure for one in several if one.failure]:
            rows.append([label, "failed", *[""] * (len(HEADS) - 3), _cell(failures[0])])
            continue
        rows.append([label, *_numbers(several, runs[to]), remark])
    return rows


def comparison_table(rows: Sequence[Sequence[str]]) -> str:
    return table(HEADS, rows)


def spread(runs: Sequence[Measurement]) -> str:
    """Median, and from least to most where there are several."""
    walls = [one.wall for one in runs]
    middle = f"{median(runs, lambda one: one.wall):.2f}"
    return middle if len(walls) == 1 else f"{middle} ({min(walls):.2f} to {max(walls):.2f})"


def where_it_goes(title: str, runs: Sequence[Measurement]) -> str:
    """One line: the run's stages, and what is outside of them."""
    stages = list(dict.fromkeys(stage for one in runs for stage in one.stages))
    start = median(runs, lambda one: one.without(*stages))
    parts = [f"start and imports {start:.2f} s"]
    for stage in stages:
        parts.append(f"{stage} {median(runs, of_stage(stage)):.2f} s")
    return f"Where {title} spends its time: {', '.join(parts)}."


def profile(title: str, product: Product, work: Path) -> str:
    """One run under cProfile: the functions of its main thread in which most of the time passes."""
    found = work / "profile"
    plain = product.again(f"{title}, profiled")
    command = (plain.command[0], "-m", "cProfile", "-o", str(found), *plain.command[1:])
    run = once(
        Contender(plain.label, command, plain.environment, plain.fresh, plain.report), work / "output.log"
    )
    if run.failure:
        raise BenchmarkError(f"{plain.label} failed: {run.failure}")
    return _functions(title, found, run.wall)


def _functions(title: str, found: Path, wall: float) -> str:
    times: _Times = vars(pstats.Stats(str(found)))["stats"]
    total = sum(own for _, _, own, _, _ in times.values())
    longest = sorted(times.items(), key=lambda item: -item[1][2])[:_TOP]
    rows = [
        [_place(file, line, name), f"{own:.2f}", f"{100 * own / total:.0f} %", str(calls)]
        for (file, line, name), (_, calls, own, _, _) in longest
    ]
    caption = f"{title} under cProfile ({wall:.1f} s; functions of the main thread by their own time):"
    return f"{caption}\n\n{table(('function', 'own s', 'share', 'calls'), rows)}"


def _place(file: str, line: int, name: str) -> str:
    path = Path(file)
    inside = next(
        (path.relative_to(root) for root in map(Path, sys.path) if root.name and root in path.parents), path
    )
    return f"`{name}`" if file == "~" else f"`{inside}:{line} {name}`"


def _numbers(runs: Sequence[Measurement], to: Sequence[Measurement]) -> list[str]:
    return [
        spread(runs),
        "1" if runs is to else f"{ratio(runs, to):.2f}",
        f"{median(runs, lambda one: one.processor):.1f}",
        f"{median(runs, lambda one: one.peak):.0f}",
        f"{median(runs, lambda one: one.anonymous):.0f}",
        f"{median(runs, lambda one: one.mapped):.0f}",
    ]


def _cell(text: str) -> str:
    return text.replace("|", "/")[:160]
