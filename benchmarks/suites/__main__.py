"""The suites of the results table.

python -m benchmarks.suites build vision-8 --out suites/vision-8
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from merging.demo.suite import Suite, build
from merging.errors import MergingError

if TYPE_CHECKING:
    from benchmarks.suites import grid

PARTS = (
    *("seeds", "ablation", "samples", "rounds", "tuned", "tuned-without-labels", "tuned-rounds"),
    *("distance", "tasks", "shift", "precisions", "sweeps", "corruption"),
)
"""The experiments, the most wanted first."""

SUITES = {"vision-8": "vision8", "text-t5-8": "text_t5", "text-llama-6": "text_llama"}


def suite(name: str) -> Suite:
    """A suite by name; its packages are imported only now."""
    found: Suite = importlib.import_module(f"benchmarks.suites.{SUITES[name]}.suite").SUITE
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.suites", description=(__doc__ or "").split("\n")[0]
    )
    commands = parser.add_subparsers(dest="command", required=True)
    making = commands.add_parser("build", help="fetch, draw and train what a suite lacks")
    making.add_argument("name", choices=SUITES)
    making.add_argument("--out", type=Path, required=True, help="folder to fill")
    measuring = commands.add_parser(
        "measure", help="every rule and calibrator on a built suite, and its experiments"
    )
    measuring.add_argument("suite", type=Path, help="its spec: SUITE/spec.json or SUITE/spec-lora.json")
    measuring.add_argument("--out", type=Path, required=True, help="folder of the records, which go on")
    measuring.add_argument("--only", nargs="+", choices=(*PARTS, "rules"), help="else all")
    telling = commands.add_parser(
        "report", help="the tables and figures of what was measured, as a section of a page"
    )
    telling.add_argument("measured", type=Path, help="folder of the records")
    telling.add_argument("--title", required=True)
    telling.add_argument("--page", type=Path, default=Path("docs/results.md"))
    measuring.add_argument(
        "--rows",
        nargs="+",
        help="of the rules and of what begins with `tuned`, by their names in the table; else all",
    )
    measuring.add_argument(
        "--defaults", action="store_true", help="search nothing: all rules at their defaults"
    )
    given = parser.parse_args(arguments)
    try:
        _run(given, sys.argv[1:] if arguments is None else arguments)
    except MergingError as error:
        sys.exit(f"error: {error}")


def _run(given: argparse.Namespace, said: Sequence[str]) -> None:
    if given.command == "measure":
        given.out.mkdir(parents=True, exist_ok=True)
        _measure(given.suite, given.out, given.only or ("rules", *PARTS), given.rows, given.defaults, said)
    elif given.command == "report":
        _report(given.page, given.title, given.measured)
    else:
        _build(given.name, given.out)


def _measure(
    spec: Path,
    out: Path,
    parts: Sequence[str],
    labels: Sequence[str] | None,
    defaults: bool,
    said: Sequence[str],
) -> None:
    from benchmarks.suites import experiments, grid, identity
    from benchmarks.suites.stamps import stamped

    built, place = grid.Suite(spec), spec.parent / "models" / "joint"
    joint = place if place.exists() else None
    identity.claim(out, built, joint)
    records = grid.Records(out / "records.jsonl")
    with stamped(out, said):
        grid.references(built, joint, records)
        for part in parts:
            if part == "rules":
                _rules(built, records, labels, defaults)
            elif part == "shift":
                found = experiments.apart(built)
                for name, values in (("shift", found.shift), ("cosines", found.cosines)):
                    (out / f"{name}.json").write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
            elif part in experiments.BY_ROW:
                experiments.BY_ROW[part](built, records, labels)
            else:
                experiments.ALL[part](built, records)


def _rules(built: grid.Suite, records: grid.Records, labels: Sequence[str] | None, defaults: bool) -> None:
    from benchmarks.suites import grid, rows

    adapters = any(ref.adapter for ref in built.spec().experts.values())
    headed = all(task.head is not None for task in built.tasks.values())
    wanted = [row for row in rows.RULES if adapters or not row.adapters_only]
    wanted = [row for row in wanted if headed or not row.needs_heads]
    wanted = [row for row in wanted if labels is None or row.label in labels]
    if defaults:
        wanted = [replace(row, sweep={}) for row in wanted]
    # The others correct what a head reads; answers of a language model are read without one.
    calibrators = rows.CALIBRATORS if headed else ("featcal",)
    grid.measure(built, "rules", [replace(row, calibrators=calibrators) for row in wanted], records)


def _report(page: Path, title: str, measured: Path) -> None:
    from benchmarks.suites.report import write

    write(page, title, measured)


def _build(name: str, out: Path) -> None:
    last = [""]

    def progress(stage: str, done: int, total: int) -> None:
        share = f"{stage} {100 * done // max(total, 1)} %"
        if share != last[0]:
            last[0] = share
            print(share, file=sys.stderr, flush=True)

    print(build(out, suite(name), progress=progress))


if __name__ == "__main__":
    main()
