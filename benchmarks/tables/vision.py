"""Rules without data on eight ViT-B/32, beside fusion_bench: TIES, TSV-M, Iso-C, WUDI."""

from __future__ import annotations

import argparse
from typing import Any

from benchmarks.comparison import comparison_rows, comparison_table, profile, where_it_goes
from benchmarks.inputs import CLIP_B32, TOY_B32, at_hand, named
from benchmarks.machine import peer_versions
from benchmarks.measure import in_turn
from benchmarks.options import add_choice, add_peer
from benchmarks.peers import fusion_bench
from benchmarks.product import AGAIN, FIRST, Product
from benchmarks.section import Found
from benchmarks.settings import DENSITY, SCALE

STEPS = 300
RULES: dict[str, dict[str, Any]] = {
    "ties": {"scale": SCALE, "density": DENSITY, "merge": "sum"},
    "tsv_m": {},
    "iso_c": {"scale": 1.0},
    "wudi": {"steps": STEPS},
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_choice(parser, list(RULES))
    add_peer(parser, "fusion-bench", "FUSION_BENCH_PYTHON", "Python of the environment with fusion_bench")
    parser.add_argument(
        "--peer-steps", type=int, default=1, help="fusion_bench's steps of WUDI (1; it wants 400)"
    )


def measured(options: argparse.Namespace) -> Found:
    inputs = TOY_B32 if options.toy else CLIP_B32
    models = at_hand(options.inputs / named("clip_b32", toy=options.toy), inputs)
    tasks = [f"task{number}" for number in range(inputs.tasks)]
    rows, times = [], []
    for name in options.methods:
        settings = {**RULES[name], **({"steps": 2} if options.toy and name == "wudi" else {})}
        spec = {
            "base": str(models / "base"),
            "experts": {task: str(models / task) for task in tasks},
            "merge": {"type": name, **settings},
        }
        product = Product.of(options.work / name, spec)
        contenders = [product.first(), product.again()]
        if options.fusion_bench:
            asked = ("--steps", str(options.peer_steps))
            contenders.append(
                fusion_bench.contender(
                    options.fusion_bench, name, models, options.work / "peer", tasks=len(tasks), more=asked
                )
            )
        runs = in_turn(contenders, runs=options.runs, work=options.work, cold=options.cold, about=name)
        remarks = {FIRST: f"{settings['steps']} steps"} if name == "wudi" else {}
        if name == "wudi":
            remarks[fusion_bench.LABEL] = f"{options.peer_steps} steps"
        rows += comparison_rows(f"`{name}`", runs, FIRST, remarks)
        times.append(where_it_goes(f"`{name}`", runs[AGAIN]))
        if options.profile:
            times.append(profile(f"`{name}`", product, options.work))
    facts = [peer_versions(options.fusion_bench, fusion_bench.PACKAGES)] if options.fusion_bench else []
    return Found("Rules without data on eight ViT-B/32", [comparison_table(rows), *times], facts)
