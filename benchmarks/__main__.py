"""`python -m benchmarks TABLE`: measures, prints the section, and puts it into the page if asked."""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from collections.abc import Sequence

from benchmarks.faults import FAULTS
from benchmarks.inputs import PRESETS, at_hand, named
from benchmarks.machine import load, machine, versions
from benchmarks.measure import BenchmarkError
from benchmarks.options import add_common, add_for_faults, obey, shown
from benchmarks.section import Section, write_part, write_section
from benchmarks.tables import TABLES

_SHOWN = 30  # faults in a section; the table counts them all


def main(arguments: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if arguments is None else arguments)
    parser, tables = _parsers()
    options = parser.parse_args(words)
    try:
        if options.table == "inputs":
            for name in options.names:
                inputs = PRESETS[name][options.toy]
                print(at_hand(options.inputs / named(name, toy=options.toy), inputs))
        elif options.table in FAULTS:
            return _try(options, shown(tables[options.table], words))
        else:
            _measure(options, shown(tables[options.table], words))
    except BenchmarkError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def _measure(options: argparse.Namespace, command: str) -> None:
    obey(options)
    options.work /= options.table
    shutil.rmtree(options.work, ignore_errors=True)
    options.work.mkdir(parents=True)
    found = TABLES[options.table].measured(options)
    facts = [machine(), versions(), *found.facts, f"{load(options.work)}; {_how(options)}"]
    section = Section(found.title, command, facts, found.body)
    print(section.markdown())
    if options.write is not None:
        write_section(options.write, section)


def _try(options: argparse.Namespace, command: str) -> int:
    """What holds when something goes wrong: all in this process and forks of it. 1 if there are faults."""
    options.work /= options.table
    shutil.rmtree(options.work, ignore_errors=True)
    options.work.mkdir(parents=True)
    start = time.monotonic()
    found = FAULTS[options.table].measured(options)
    facts = [machine(), versions(), *found.facts, f"seed {options.seed}, {time.monotonic() - start:.0f} s"]
    faults = (
        ["\n".join(f"- {' '.join(fault.split())}" for fault in found.faults[:_SHOWN])] if found.faults else []
    )
    section = Section(found.title, command, facts, [*found.body, *faults])
    print(section.markdown())
    if options.write is not None:
        write_part(options.write, section)
    return 1 if faults else 0


def _how(options: argparse.Namespace) -> str:
    cache = (
        "page cache dropped before each run" if options.cold else "inputs in the page cache where they fit"
    )
    rounds = "1 round" if options.runs == 1 else f"{options.runs} rounds"
    return f"{rounds}, {cache}{', TOY INPUTS' if options.toy else ''}"


def _parsers() -> tuple[argparse.ArgumentParser, dict[str, argparse.ArgumentParser]]:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="One command a table. Inputs are drawn from seeds, and made where they are missing.",
        epilog="Example: python -m benchmarks merge --mergekit venv/bin/mergekit-yaml --write",
    )
    commands = parser.add_subparsers(dest="table", required=True, metavar="TABLE")
    made = commands.add_parser("inputs", help="make the inputs beforehand: " + ", ".join(PRESETS))
    add_common(made)
    made.add_argument("names", nargs="*", default=list(PRESETS), metavar="NAME", help=", ".join(PRESETS))
    tables = {}
    for name, table in TABLES.items():
        what = (table.__doc__ or "").strip().split("\n")[0]
        tables[name] = commands.add_parser(name, help=what, description=table.__doc__)
        add_common(tables[name])
        table.add_arguments(tables[name])
    for name, fault in FAULTS.items():
        what = (fault.__doc__ or "").strip().split("\n")[0]
        tables[name] = commands.add_parser(name, help=what, description=fault.__doc__)
        add_for_faults(tables[name])
        fault.add_arguments(tables[name])
    return parser, tables


if __name__ == "__main__":
    sys.exit(main())
