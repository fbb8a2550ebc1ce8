"""FeatCal on blocks of Llama-3.1-8B's shape: peak memory, and what `plan` says of the whole 32 blocks."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks import children
from benchmarks.comparison import comparison_rows, comparison_table, profile, where_it_goes
from benchmarks.inputs import LLAMA_8B_BLOCKS, TOY_8B_BLOCKS, Texts, at_hand, named
from benchmarks.measure import in_turn, median
from benchmarks.options import add_once
from benchmarks.product import FIRST, Product, tensor_tasks
from benchmarks.section import Found, table

WHOLE = 32
NOTE = (
    "The planned peak and seconds (where the plan tells them) stand beside the measured ones; the row of "
    "32 blocks is planned from headers alone, and extrapolated along the straight line through the "
    "measured depths."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--blocks", type=int, nargs="+", default=[4, 8], help="depths that are run (4 8)")
    parser.add_argument("--memory", help='the spec\'s "memory": "12GiB", ...')
    parser.add_argument("--precision", choices=("float32", "mixed"), help="FeatCal's (float32)")
    add_once(parser)


def measured(options: argparse.Namespace) -> Found:
    inputs = TOY_8B_BLOCKS if options.toy else LLAMA_8B_BLOCKS
    rows, times, planned = [], [], []
    seconds: dict[int, float] = {}
    peaks: dict[int, float] = {}
    for blocks in options.blocks:
        models = at_hand(options.inputs / named(f"llama8b_{blocks}", toy=options.toy), _deep(inputs, blocks))
        product = Product.of(options.work / str(blocks), _spec(models, inputs, options))
        contenders = product.runs(once=options.once)
        runs = in_turn(
            contenders,
            runs=options.runs,
            work=options.work,
            cold=options.cold,
            about=f"{blocks} blocks",
        )
        every = [run for found in runs.values() for run in found]
        seconds[blocks] = median(every, lambda one: sum(one.stages.values()))
        peaks[blocks] = median(every, lambda one: one.peak)
        rows += comparison_rows(f"{blocks} blocks", runs, FIRST)
        times.append(where_it_goes(f"{blocks} blocks", runs[contenders[-1].label]))
        if options.profile:
            times.append(profile(f"{blocks} blocks", product, options.work))
        planned.append(_planned(f"{blocks} blocks", plan(product), seconds[blocks], peaks[blocks]))
    headers = replace(_deep(inputs, WHOLE), files="headers")
    models = at_hand(options.inputs / named(f"llama8b_{WHOLE}_headers", toy=options.toy), headers)
    asked = {**_spec(models, inputs, options), "allow": ["disk"]}  # it is only planned
    whole = Product.of(options.work / "whole", asked)
    expected = (_line(seconds), _line(peaks)) if len(seconds) > 1 else (None, None)
    planned.append(_planned(f"{WHOLE} blocks, extrapolated", plan(whole), *expected))
    heads = ("", "planned GiB", "measured GiB", "ratio", "planned s", "measured s", "ratio")
    return Found(
        "FeatCal on blocks of Llama-3.1-8B's shape",
        [comparison_table(rows), table(heads, planned), NOTE, *times],
    )


def plan(product: Product) -> dict[str, Any]:
    """What `plan` says of the run."""
    told: dict[str, Any] = json.loads(
        children.ask("merging", "pipeline", "plan", str(product.spec), "--json")
    )
    return told


def _deep(inputs: Texts, blocks: int) -> Texts:
    return replace(inputs, shape=replace(inputs.shape, layers=blocks))


def _spec(models: Path, inputs: Texts, options: argparse.Namespace) -> dict[str, Any]:
    numbers = range(1, inputs.experts + 1)
    files = {f"expert{number}": models / f"tokens{number}.safetensors" for number in numbers}
    return {
        "base": str(models / "base"),
        "experts": {expert: str(models / expert) for expert in files},
        "merge": {"type": "task_arithmetic"},
        "calibrate": {"type": "featcal"},
        "tasks": tensor_tasks(files, examples=inputs.sequences),
        **({"precision": options.precision} if options.precision else {}),
        **({"memory": options.memory} if options.memory else {}),
    }


def _line(points: dict[int, float]) -> float:
    """At the whole depth, along the line through the first and the last."""
    (low, first), *_, (high, last) = points.items()
    return first + (last - first) * (WHOLE - low) / (high - low)


def _planned(title: str, told: dict[str, Any], seconds: float | None, peak: float | None) -> list[str]:
    """`peak` in MiB."""
    gibibytes, expected = told["peak_bytes"] / 2**30, told.get("seconds")
    found = None if peak is None else peak / 1024
    return [title, *_compared(gibibytes, found), *_compared(expected, seconds)]


def _compared(planned: float | None, found: float | None) -> list[str]:
    ratio = f"{planned / found:.2f}" if planned is not None and found else ""
    return [*("" if value is None else f"{value:.2f}" for value in (planned, found)), ratio]
