"""What all tables can be asked: where inputs and scratch files lie, how often, whose Python runs a peer."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from benchmarks.section import FAULTS_PAGE, PAGE

BUILD = Path("build") / "benchmarks"


def add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--inputs", type=_path, metavar="INPUTS", default=_path(BUILD / "inputs"), help="folder of the inputs"
    )
    parser.add_argument(
        "--work",
        type=_path,
        metavar="WORK",
        default=_path(BUILD / "work"),
        help="scratch folder, of the same disk",
    )
    parser.add_argument("--runs", type=int, default=3, help="how often each contender runs (3)")
    parser.add_argument("--threads", type=int, help="OMP_NUM_THREADS of all contenders; else as it is set")
    parser.add_argument("--cold", action="store_true", help="drop the page cache before every run (root)")
    parser.add_argument(
        "--toy", action="store_true", help="tiny inputs: shows that it works, measures nothing"
    )
    parser.add_argument(
        "--profile", action="store_true", help="one more run, under cProfile, of each headline"
    )
    parser.add_argument(
        "--write",
        type=_path,
        nargs="?",
        const=_path(PAGE),
        metavar="PAGE",
        help=f"also put the section into this page ({PAGE})",
    )


def add_for_faults(parser: argparse.ArgumentParser) -> None:
    """What trials of faults can be asked: they make their tiny inputs themselves, and measure no time."""
    parser.add_argument("--seed", type=int, default=0, help="which faults are drawn (0)")
    parser.add_argument(
        "--work", type=_path, metavar="WORK", default=_path(BUILD / "faults"), help="scratch folder"
    )
    parser.add_argument(
        "--write",
        type=_path,
        nargs="?",
        const=_path(FAULTS_PAGE),
        metavar="PAGE",
        help=f"also put the section into this page ({FAULTS_PAGE})",
    )


def add_choice(parser: argparse.ArgumentParser, choices: Sequence[str]) -> None:
    parser.add_argument(
        "--methods",
        nargs="+",
        choices=choices,
        default=list(choices),
        metavar="NAME",
        help=", ".join(choices),
    )


def add_once(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--once", action="store_true", help="only first runs, none that remembers another")


def add_peer(parser: argparse.ArgumentParser, name: str, metavar: str, what: str) -> None:
    parser.add_argument(f"--{name}", type=_path, metavar=metavar, help=what)


def obey(options: argparse.Namespace) -> None:
    """What holds for every process that is started from here."""
    if options.threads:
        os.environ["OMP_NUM_THREADS"] = str(options.threads)


def shown(parser: argparse.ArgumentParser, words: Sequence[str]) -> str:
    """The command as it can stand on a page: this machine's paths replaced by what they are."""
    names = {option: action.metavar for action in parser._actions for option in action.option_strings}
    kept = []
    for before, word in zip(["", *words], words, strict=False):
        path = os.path.isabs(word) or word.startswith((".", "~"))
        kept.append(str(names.get(before) or "PATH") if path else word)
    return " ".join(["python -m benchmarks", *kept])


def _path(text: str | Path) -> Path:
    """Made absolute, not resolved: a virtual environment's Python is a link."""
    return Path(os.path.abspath(Path(text).expanduser()))
