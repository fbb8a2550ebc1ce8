"""One process beside several by torchrun: the same tensors, how much processor time, how much wall time."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from benchmarks import children
from benchmarks.comparison import comparison_rows, comparison_table, where_it_goes
from benchmarks.inputs import CLIP_B32, TOY_B32, Pictures, at_hand, named
from benchmarks.measure import in_turn, ratio
from benchmarks.options import add_choice
from benchmarks.product import FIRST, Product
from benchmarks.section import Found
from benchmarks.tables.calibrate import METHODS, spec
from benchmarks.tables.vision import RULES
from merging.cores import cores

METHODS_AND_RULES = (*METHODS, "task_arithmetic", *RULES)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_choice(parser, METHODS_AND_RULES)
    parser.set_defaults(methods=["featcal", "ties"])
    parser.add_argument("--processes", type=int, default=2, help="ranks on this machine (2)")
    parser.add_argument("--examples", type=int, default=64, help="pictures a task (64)")


def measured(options: argparse.Namespace) -> Found:
    inputs = TOY_B32 if options.toy else CLIP_B32
    models = at_hand(options.inputs / named("clip_b32", toy=options.toy), inputs)
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(options.processes))
    threads = max(1, (options.threads or cores()) // options.processes)
    several = f"torchrun, {options.processes} processes"
    rows, times = [], []
    for name in options.methods:
        asked = _spec(name, models, inputs, min(options.examples, inputs.images))
        alone, shared = (Product.of(options.work / name / who, asked) for who in ("one", "several"))
        contenders = [alone.first(), shared.launched(several, (*launcher, "-m", "merging"), threads=threads)]
        runs = in_turn(contenders, runs=options.runs, work=options.work, cold=options.cold, about=name)
        last = "calibrated" if name == "featcal" else "merged"
        apart = json.loads(children.ask("benchmarks.apart", str(alone.out / last), str(shared.out / last)))
        processor = ratio(runs[several], runs[FIRST], lambda run: run.processor)
        remark = f"largest difference {apart['largest']:.2g}; {processor:.2f} times the processor time"
        rows += comparison_rows(f"`{name}`", runs, FIRST, {several: remark})
        times.append(where_it_goes(f"`{name}` in {options.processes} processes", runs[several]))
    note = (
        "Memory is that of the largest process, not their sum. Differences are relative to each tensor's "
        f"largest entry. All runs are first runs; of several processes each has {threads} thread(s)."
    )
    return Found("Several processes", [comparison_table(rows), note, *times])


def _spec(name: str, models: Path, inputs: Pictures, examples: int) -> dict[str, Any]:
    if name in METHODS:
        return spec(name, models, inputs, examples)
    whole = spec("regmean", models, inputs, examples)
    return {**whole, "merge": {"type": name, **RULES.get(name, {})}, "tasks": {}}
