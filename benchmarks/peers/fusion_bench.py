"""fusion_bench and FeatCal's authors' code as contenders."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.measure import Contender

LABEL, AUTHORS = "fusion_bench", "FeatCal, authors' code"
PACKAGES = ("fusion-bench", "torch", "transformers")
_SCRIPTS = Path(__file__).parent / "scripts"
_OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}


def contender(
    python: Path, method: str, inputs: Path, out: Path, *, tasks: int, more: Sequence[str] = ()
) -> Contender:
    script = (str(python), str(_SCRIPTS / "fusion_bench_run.py"), method)
    places = ("--inputs", str(inputs), "--out", str(out))
    return Contender(
        LABEL, (*script, *places, "--tasks", str(tasks), *more), _OFFLINE, fresh=(out,), may_fail=True
    )


def authors(python: Path, src: Path, inputs: Path, out: Path, *, tasks: int, examples: int) -> Contender:
    """`src`: that folder of a checkout of FeatCal's repository."""
    script = (str(python), str(_SCRIPTS / "featcal_run.py"), "--src", str(src))
    places = ("--inputs", str(inputs), "--out", str(out))
    sizes = ("--tasks", str(tasks), "--examples", str(examples))
    return Contender(AUTHORS, (*script, *places, *sizes), _OFFLINE, fresh=(out,), may_fail=True)
