"""Rules without data on four Llama checkpoints of 1.1 B parameters in bf16, beside mergekit."""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import children
from benchmarks.comparison import comparison_rows, comparison_table, profile, where_it_goes
from benchmarks.floors import disk_floor
from benchmarks.inputs import LLAMA_1B, TOY_1B, at_hand, named
from benchmarks.machine import peer_versions
from benchmarks.measure import in_turn
from benchmarks.options import add_choice, add_peer
from benchmarks.peers import mergekit
from benchmarks.product import AGAIN, FIRST, Product
from benchmarks.section import Found
from benchmarks.settings import DENSITY, SCALE

EXPERTS = ("expert1", "expert2", "expert3")


@dataclass(frozen=True)
class Case:
    """One rule, as both tools are asked for it."""

    settings: Mapping[str, Any]
    peer: str  # mergekit's name
    variants: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # label -> further settings
    each: Mapping[str, float] = field(default_factory=dict)  # mergekit's parameters of every model
    parameters: Mapping[str, float] = field(default_factory=dict)  # and of the merge
    experts: tuple[str, ...] = EXPERTS
    peer_models: tuple[str, ...] = ()  # where mergekit wants others listed than the experts
    base: bool = True  # whether the base takes part
    exact: bool = True  # whether there is an exact result to compare with


_TRIMMED = {"weight": SCALE, "density": DENSITY}
_DARE = {"type": "dare_ties", "density": DENSITY, "scale": SCALE, "merge": "sum"}
CASES = {
    "average": Case({"type": "average"}, "linear", each={"weight": 1 / 3}, base=False),
    "task_arithmetic": Case(
        {"type": "task_arithmetic", "scale": SCALE}, "task_arithmetic", each={"weight": SCALE}
    ),
    "slerp": Case(
        {"type": "slerp", "t": 0.5},
        "slerp",
        parameters={"t": 0.5},
        experts=EXPERTS[:1],
        peer_models=("base", EXPERTS[0]),
    ),
    "model_stock": Case({"type": "model_stock", "clamp": False}, "model_stock"),
    "ties": Case(
        {"type": "ties", "density": DENSITY, "trim": "tensor"},
        "ties",
        variants={"one threshold for the model": {"trim": "model"}},
        each=_TRIMMED,
    ),
    "dare_ties": Case(
        _DARE, "dare_ties", variants={"norms matched": {"rescale": "norm"}}, each=_TRIMMED, exact=False
    ),
}
NOTES = (
    "`ties` trims each tensor by itself, as mergekit does, and in the second form the whole task vector, "
    "as published. `dare_ties` divides by the density, as published, and in the second form matches L1 "
    "norms, as mergekit does. Remarks: share of entries that are not the correctly rounded exact ones "
    "(float64), and the relative error of the merged task vector beside what rounding alone costs. Random "
    "rules draw other masks in each tool, so they are not compared."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_choice(parser, list(CASES))
    add_peer(parser, "mergekit", "MERGEKIT_YAML", "mergekit-yaml of its environment")
    parser.add_argument(
        "--mergekit-flags", nargs="*", default=[], metavar="FLAG", help="without dashes: lazy-unpickle, ..."
    )


def measured(options: argparse.Namespace) -> Found:
    inputs = TOY_1B if options.toy else LLAMA_1B
    models = at_hand(options.inputs / named("llama1b", toy=options.toy), inputs)
    rows: list[list[str]] = []
    times: list[str] = []
    for name in options.methods:
        scratch = options.work / name
        more, goes = _one(name, CASES[name], models, scratch, options)
        rows += more
        times += goes
        shutil.rmtree(scratch, ignore_errors=True)
    facts = []
    if options.mergekit:
        facts.append(
            peer_versions(options.mergekit.with_name("python"), ["mergekit", "torch", "transformers"])
        )
    return Found("Merging without data", [comparison_table(rows), NOTES, *times], facts)


def _one(
    name: str, case: Case, models: Path, scratch: Path, options: argparse.Namespace
) -> tuple[list[list[str]], list[str]]:
    """Rows of one rule, and where its time goes."""
    base = models / "base"
    product = Product.of(scratch / "merging", _spec(case.settings, case, models))
    read = [models / model for model in (*(("base",) if case.base else ()), *case.experts)]
    contenders = [disk_floor(read, base, scratch / "floor"), product.first(), product.again()]
    for label, changes in case.variants.items():
        variant = Product.of(
            scratch / label.replace(" ", "-"), _spec({**case.settings, **changes}, case, models)
        )
        contenders += [variant.first(f"{FIRST}, {label}"), variant.again(f"{AGAIN}, {label}")]
    if options.mergekit:
        contenders += _peers(case, models, scratch / "mergekit", options)
    runs = in_turn(contenders, runs=options.runs, work=options.work, cold=options.cold, about=name)
    remarks = {}
    if case.exact:
        remarks[AGAIN] = _error(name, case, models, product.merged)
        if options.mergekit and not runs[mergekit.PLAIN][0].failure:
            remarks[mergekit.PLAIN] = _error(name, case, models, scratch / "mergekit" / "out")
    goes = [where_it_goes(f"`{name}`", runs[AGAIN])]
    if options.profile:
        goes.append(profile(f"`{name}`", product, options.work))
    return comparison_rows(f"`{name}`", runs, FIRST, remarks), goes


def _spec(settings: Mapping[str, Any], case: Case, models: Path) -> dict[str, Any]:
    experts = {expert: str(models / expert) for expert in case.experts}
    return {"base": str(models / "base"), "experts": experts, "merge": dict(settings)}


def _peers(case: Case, models: Path, folder: Path, options: argparse.Namespace) -> list[mergekit.Contender]:
    text = mergekit.config(
        case.peer,
        [models / model for model in case.peer_models or case.experts],
        base=models / "base" if case.base else None,
        each=case.each,
        parameters=case.parameters,
    )
    flags = [f"--{flag}" for flag in options.mergekit_flags]
    return mergekit.contenders(options.mergekit, text, folder, flags)


def _error(rule: str, case: Case, models: Path, merged: Path) -> str:
    inputs = [str(models / model) for model in ("base", *case.experts)]
    told = json.loads(children.ask("benchmarks.oracle", rule, str(merged), *inputs))
    parts = (f"{100 * told['differing']:.2f} % differ", f"error {told['error']:.5f}")
    return f"{', '.join(parts)}, of rounding {told['rounding']:.5f}"
