"""LoRA experts combined into one adapter, exactly and cut by an SVD, beside peft's add_weighted_adapter."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from benchmarks import children
from benchmarks.comparison import comparison_rows, comparison_table, profile, where_it_goes
from benchmarks.inputs import PEFT, TOY_PEFT, at_hand, named
from benchmarks.machine import peer_versions
from benchmarks.measure import Contender, in_turn
from benchmarks.options import add_choice, add_peer
from benchmarks.product import AGAIN, FIRST, Product
from benchmarks.section import Found

FORMS: dict[str, tuple[str, ...]] = {
    "exact": ("cat", "linear"),
    "svd": ("svd",),
}  # peft's combinations beside it
_PEER = Path(__file__).parent.parent / "peers" / "scripts" / "peft_run.py"
NOTE = (
    "The mean of the adapters, as an adapter: at the sum of their ranks, where nothing is lost (peft's "
    "`cat`; its `linear` is its default and averages A and B apart), and at the rank of one of them. "
    "Errors are relative to the mean of the updates B A, over all linears; the adapters are random, so "
    "they share less than trained ones do."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_choice(parser, list(FORMS))
    add_peer(parser, "peft", "PEFT_PYTHON", "Python of an environment with peft")


def measured(options: argparse.Namespace) -> Found:
    inputs = TOY_PEFT if options.toy else PEFT
    models = at_hand(options.inputs / named("peft", toy=options.toy), inputs)
    adapters = [models / f"a{number}" for number in range(inputs.adapters)]
    rows, times = [], []
    for form in options.methods:
        rank = "exact" if form == "exact" else inputs.rank
        product = Product.of(options.work / form, _spec(models, adapters, rank))
        peers = _peers(form, models, len(adapters), options)
        contenders = [product.first(), product.again(), *peers.values()]
        runs = in_turn(contenders, runs=options.runs, work=options.work, cold=options.cold, about=form)
        results = {AGAIN: product.merged, **{contender.label: out for out, contender in peers.items()}}
        remarks = {
            label: f"error {_error(out, adapters):.3g}"
            for label, out in results.items()
            if not runs[label][0].failure
        }
        rows += comparison_rows(f"rank {rank}", runs, FIRST, remarks)
        times.append(where_it_goes(f"rank {rank}", runs[AGAIN]))
        if options.profile:
            times.append(profile(f"rank {rank}", product, options.work))
    facts = [peer_versions(options.peft, ["peft", "torch", "transformers"])] if options.peft else []
    return Found("Combining LoRA adapters", [comparison_table(rows), NOTE, *times], facts)


def _spec(models: Path, adapters: list[Path], rank: int | str) -> dict[str, Any]:
    return {
        "base": str(models / "base"),
        "experts": {adapter.name: {"adapter": str(adapter)} for adapter in adapters},
        "merge": {"type": "average"},
        "output": {"form": "lora", "rank": rank},
    }


def _peers(form: str, models: Path, count: int, options: argparse.Namespace) -> dict[Path, Contender]:
    """Where its adapter will lie -> contender."""
    found = {}
    for combination in FORMS[form] if options.peft else ():
        out = options.work / f"peft-{combination}"
        command = (str(options.peft), str(_PEER), combination, "--inputs", str(models), "--out", str(out))
        found[out / "merged"] = Contender(
            f"peft, {combination}",
            (*command, "--adapters", str(count)),
            {"HF_HUB_OFFLINE": "1"},
            fresh=(out,),
            may_fail=True,
        )
    return found


def _error(merged: Path, adapters: list[Path]) -> float:
    return float(children.ask("benchmarks.adapter_error", str(merged), *map(str, adapters)))
