"""FeatCal, RegMean, RegMean++, Chain of Merges on eight ViT-B/32, against the arithmetic floor and peers."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from benchmarks.comparison import comparison_rows, comparison_table, profile, where_it_goes
from benchmarks.floors import gemm_rates
from benchmarks.inputs import CLIP_B32, TOY_B32, Pictures, at_hand, named
from benchmarks.machine import peer_versions
from benchmarks.measure import Contender, in_turn, median, of_stage
from benchmarks.operations import operations, seconds, walk_of
from benchmarks.options import add_choice, add_peer
from benchmarks.peers import fusion_bench
from benchmarks.product import AGAIN, FIRST, Product, tensor_tasks
from benchmarks.section import Found, table
from benchmarks.settings import SCALE

SHRINK = 0.95
METHODS: dict[str, dict[str, Any]] = {  # the spec's "merge" and "calibrate"
    "featcal": {"merge": {"type": "task_arithmetic", "scale": SCALE}, "calibrate": {"type": "featcal"}},
    "regmean": {"merge": {"type": "regmean", "shrink": SHRINK}},
    "regmean_plus_plus": {"merge": {"type": "regmean_plus_plus", "shrink": SHRINK}},
    "chain_of_merges": {"merge": {"type": "chain_of_merges"}},
}
NOTE = (
    "The floor is the operations that the method needs (forwards, the statistics pass without its last "
    "linear; half Grams; cross moments by the smaller product; right-hand sides; Cholesky solves), each "
    "at the rate of this machine's best float32 product, measured before and after; the higher rate "
    "counts. `stage` is the merge stage, and FeatCal's calibrate stage; evaluation and imports are "
    "outside of it."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_choice(parser, list(METHODS))
    parser.add_argument("--examples", type=int, nargs="+", default=[64, 256], help="pictures a task (64 256)")
    add_peer(parser, "fusion-bench", "FUSION_BENCH_PYTHON", "Python of the environment with fusion_bench")
    add_peer(
        parser, "featcal-src", "FEATCAL_SRC", "src of a checkout of the authors' repository; runs under that"
    )


def measured(options: argparse.Namespace) -> Found:
    inputs = TOY_B32 if options.toy else CLIP_B32
    models = at_hand(options.inputs / named("clip_b32", toy=options.toy), inputs)
    rate = gemm_rates(toy=options.toy)["float32"]
    rows: list[list[str]] = []
    times: list[str] = []
    stages: list[tuple[str, float, dict[str, float]]] = []  # title, seconds of the stage, operations
    for name in options.methods:
        for examples in options.examples:
            examples = min(examples, inputs.images)
            title = f"`{name}`, n = {examples}"
            product = Product.of(options.work / f"{name}-{examples}", spec(name, models, inputs, examples))
            contenders = [product.first(), product.again()]
            contenders += _peers(name, models, inputs, examples, options)
            runs = in_turn(contenders, runs=options.runs, work=options.work, cold=options.cold, about=title)
            rows += comparison_rows(title, runs, FIRST)
            times.append(where_it_goes(title, runs[AGAIN]))
            if options.profile:
                times.append(profile(title, product, options.work))
            stage = median([*runs[FIRST], *runs[AGAIN]], of_stage(stage_of(name)))
            walk = walk_of(
                inputs.shape.linears,
                hidden=inputs.shape.hidden,
                blocks=inputs.shape.layers,
                tasks=inputs.tasks,
                examples=examples,
                length=inputs.shape.tokens,
            )
            stages.append((title, stage, operations(name, walk)))
    rate = max(rate, gemm_rates(toy=options.toy)["float32"])
    floors = [_floor_row(title, stage, counts, rate) for title, stage, counts in stages]
    heads = ("", "TFLOP", "of which forwards", "floor s", "stage s", "stage / floor")
    facts = [f"float32 products at {rate / 1e9:.0f} GFLOP/s"]
    if options.fusion_bench:
        facts.append(peer_versions(options.fusion_bench, fusion_bench.PACKAGES))
    return Found(
        "Calibrating eight ViT-B/32", [comparison_table(rows), table(heads, floors), NOTE, *times], facts
    )


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
    return "calibrate" if name == "featcal" else "merge"


def _peers(
    name: str, models: Path, inputs: Pictures, examples: int, options: argparse.Namespace
) -> list[Contender]:
    if options.fusion_bench is None:
        return []
    out = options.work / "peer"
    if name == "featcal":
        if options.featcal_src is None:
            return []
        return [
            fusion_bench.authors(
                options.fusion_bench, options.featcal_src, models, out, tasks=inputs.tasks, examples=examples
            )
        ]
    method = name if name.startswith("regmean") else "regmean"  # nobody else has Chain of Merges
    more = ("--examples", str(examples))
    return [fusion_bench.contender(options.fusion_bench, method, models, out, tasks=inputs.tasks, more=more)]


def _floor_row(title: str, stage: float, counts: dict[str, float], rate: float) -> list[str]:
    floor = seconds(counts, rate)
    total = sum(counts.values())
    return [
        title,
        f"{total / 1e12:.3g}",
        f"{100 * counts['forwards'] / total:.0f} %",
        f"{floor:.3g}",
        f"{stage:.2f}",
        f"{stage / floor:.2f}",
    ]
