"""FeatCal, RegMean, RegMean++, Chain of Merges on eight ViT-B/32, against the arithmetic floor and peers."""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import children
from benchmarks.comparison import comparison_rows, comparison_table, profile, where_it_goes
from benchmarks.inputs import CLIP_B32, TOY_B32, Pictures, at_hand, named
from benchmarks.machine import peer_versions
from benchmarks.measure import Contender, in_turn
from benchmarks.operations import operations, seconds, walk_of
from benchmarks.options import add_choice, add_once, add_peer
from benchmarks.peers import fusion_bench
from benchmarks.product import FIRST, Product, tensor_tasks
from benchmarks.section import Found, table
from benchmarks.settings import SCALE

SHRINK = 0.95
METHODS: dict[str, dict[str, Any]] = {  # the spec's "merge" and "calibrate"
    "featcal": {"merge": {"type": "task_arithmetic", "scale": SCALE}, "calibrate": {"type": "featcal"}},
    "featcal_mixed": {
        "merge": {"type": "task_arithmetic", "scale": SCALE},
        "calibrate": {"type": "featcal"},
        "precision": "mixed",
    },
    "regmean": {"merge": {"type": "regmean", "shrink": SHRINK}},
    "regmean_plus_plus": {"merge": {"type": "regmean_plus_plus", "shrink": SHRINK}},
    "chain_of_merges": {"merge": {"type": "chain_of_merges"}},
}


class Paced(NamedTuple):
    """A stage's seconds without the stops, and operations a second of the machine at these."""

    seconds: float
    rate: float
    slowest: float
    fastest: float


NOTE = (
    "The floor is the operations that the method needs (forwards, the statistics pass without its last "
    "linear; half Grams; cross moments by the smaller product; right-hand sides; Cholesky solves), each "
    "at the rate of this machine's best float32 product. A shared machine is now fast, now slow: one more "
    "run stops between its steps, several times a minute, and takes that rate; its seconds are those "
    "without the stops. `stage` is the merge stage, FeatCal's the calibrate stage; evaluation and imports "
    "are outside of it. `featcal_mixed` multiplies in bfloat16, and is held against the same floor."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_choice(parser, list(METHODS))
    parser.add_argument("--examples", type=int, nargs="+", default=[64, 256], help="pictures a task (64 256)")
    parser.add_argument(
        "--without", nargs="+", default=[], metavar="NAME-N", help="methods not to run with so many pictures"
    )
    add_once(parser)
    add_peer(parser, "fusion-bench", "FUSION_BENCH_PYTHON", "Python of the environment with fusion_bench")
    add_peer(
        parser, "featcal-src", "FEATCAL_SRC", "src of a checkout of the authors' repository; runs under that"
    )


def measured(options: argparse.Namespace) -> Found:
    inputs = TOY_B32 if options.toy else CLIP_B32
    models = at_hand(options.inputs / named("clip_b32", toy=options.toy), inputs)
    rows: list[list[str]] = []
    times: list[str] = []
    floors: list[list[str]] = []
    for name in options.methods:
        for examples in options.examples:
            examples = min(examples, inputs.images)
            if f"{name}-{examples}" in options.without:
                continue
            title = f"`{name}`, n = {examples}"
            product = Product.of(options.work / f"{name}-{examples}", spec(name, models, inputs, examples))
            own = product.runs(once=options.once)
            contenders = own + _peers(name, models, inputs, examples, options)
            runs = in_turn(contenders, runs=options.runs, work=options.work, cold=options.cold, about=title)
            rows += comparison_rows(title, runs, FIRST)
            times.append(where_it_goes(title, runs[own[-1].label]))
            if options.profile:
                times.append(profile(title, product, options.work))
            walk = walk_of(
                inputs.shape.linears,
                hidden=inputs.shape.hidden,
                blocks=inputs.shape.layers,
                tasks=inputs.tasks,
                examples=examples,
                length=inputs.shape.tokens,
            )
            counts = operations(name.removesuffix("_mixed"), walk)
            floors.append(_floor_row(title, paced(product, stage_of(name), toy=options.toy), counts))
    heads = ("", "TFLOP", "of which forwards", "GFLOP/s meanwhile", "floor s", "stage s", "stage / floor")
    facts = []
    if options.fusion_bench:
        facts.append(peer_versions(options.fusion_bench, fusion_bench.PACKAGES))
    return Found(_title(options.methods), [comparison_table(rows), table(heads, floors), NOTE, *times], facts)


def _title(methods: Sequence[str]) -> str:
    """Of the section, one for calibration and one for merging with data, where they are measured apart."""
    if any(name.startswith("featcal") for name in methods):
        return "Calibrating eight ViT-B/32"
    return "Merging eight ViT-B/32 with data"


def spec(name: str, models: Path, inputs: Pictures, examples: int) -> dict[str, Any]:
    tasks = [f"task{number}" for number in range(inputs.tasks)]
    files = {task: models / f"px{number}.safetensors" for number, task in enumerate(tasks)}
    return {
        "base": str(models / "base"),
        "experts": {task: str(models / task) for task in tasks},
        **METHODS[name],
        "tasks": tensor_tasks(files, examples=examples),
    }


def stage_of(name: str) -> str:
    """In which the method's own work is done."""
    return "calibrate" if name.startswith("featcal") else "merge"


def paced(product: Product, stage: str, *, toy: bool) -> Paced:
    """One more run, and the machine's rate along with it."""
    shutil.rmtree(product.out, ignore_errors=True)
    words = (str(product.spec), stage, *(["--toy"] if toy else []))
    try:
        return Paced(**json.loads(children.ask("benchmarks.paced", *words, environment=product.environment)))
    finally:
        shutil.rmtree(product.out, ignore_errors=True)


def _peers(
    name: str, models: Path, inputs: Pictures, examples: int, options: argparse.Namespace
) -> list[Contender]:
    if options.fusion_bench is None:
        return []
    out = options.work / "peer"
    if name == "featcal_mixed":  # beside the authors' code in the same section
        return []
    if name == "featcal":
        if options.featcal_src is None:
            return []
        return [
            fusion_bench.authors(
                options.fusion_bench, options.featcal_src, models, out, tasks=inputs.tasks, examples=examples
            )
        ]
    method = name if name.startswith("regmean") else "regmean"  # nobody else has Chain of Merges
    if method != name and method in options.methods:
        return []
    more = ("--examples", str(examples))
    return [fusion_bench.contender(options.fusion_bench, method, models, out, tasks=inputs.tasks, more=more)]


def _floor_row(title: str, run: Paced, counts: dict[str, float]) -> list[str]:
    floor = seconds(counts, run.rate)
    total = sum(counts.values())
    return [
        title,
        f"{total / 1e12:.3g}",
        f"{100 * counts['forwards'] / total:.0f} %",
        f"{run.rate / 1e9:.0f} ({run.slowest / 1e9:.0f} to {run.fastest / 1e9:.0f})",
        f"{floor:.3g}",
        f"{run.seconds:.2f}",
        f"{run.seconds / floor:.2f}",
    ]
