"""The papers' experiments in small, and what makes a suite hard: distance of the experts, number of tasks."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from benchmarks.suites.corrupted import CORRUPTIONS, corrupted
from benchmarks.suites.grid import Entry, Records, Suite, measure
from benchmarks.suites.rows import ABLATION, Row
from merging.checkpoints.source import CheckpointSource
from merging.contracts.models import Models
from merging.errors import SpecError
from merging.held_out import HeldOut
from merging.scoring import measure_drift
from merging.search import search

SAMPLES = (1, 2, 4, 8, 32, 256)
SEEDS = (0, 1, 2)
SWEEPS: Mapping[str, Sequence[float]] = {
    "interpolation": (0.0, 0.1, 0.25, 0.4, 0.6, 1.0),
    "anchor": (0.0, 1.0, 1.6, 2.2, 3.0),
    "ridge": (0.0001, 0.0005, 0.002, 0.01, 0.05, 0.2, 1.0),
}
"""Of FeatCal's settings, each with the others at their defaults."""
SWEEP_EXAMPLES = 64

TRIED: Mapping[str, Sequence[float]] = {
    "ridge": (0.0002, 0.001, 0.004),
    "interpolation": (0.25, 0.5),
}
"""Of FeatCal's settings, for the search on validation examples; fitted on SWEEP_EXAMPLES a task."""

SHARES = (0.25, 0.5, 0.75, 1.0)
"""Of the way from the base to the expert, at which its twin stands."""
COUNTS = (2, 4, 8)

ROUNDS = (1, 2, 3)
LATER_ANCHORS = (2.2, 1.0)
"""FeatCal's `anchor` from the second round on: as in the first, or the model itself."""

PRECISIONS = ("float32", "mixed", "float64")

AVERAGE = Row("average", "average", calibrators=("featcal",))
CHAIN = Row("Chain of Merges", "chain_of_merges", calibrators=("featcal",))
TUNED = (
    AVERAGE,
    CHAIN,
    Row("WUDI", "wudi", {"scale": 1.0}, calibrators=("featcal",)),
    Row("TSV-M", "tsv_m", {"scale": 1.0}, calibrators=("featcal",)),
    Row("RegMean++", "regmean_plus_plus", calibrators=("featcal",)),
)
HEADLINE = (
    AVERAGE,
    Row("RegMean", "regmean", calibrators=()),
    Row("RegMean++", "regmean_plus_plus", calibrators=()),
    CHAIN,
)
_SHIFT_EXAMPLES = 64


def samples(suite: Suite, records: Records) -> None:
    """FeatCal on the average, Chain of Merges and FeatCal on that, by examples a task."""
    for count in SAMPLES:
        data = suite.data(examples=count)
        measure(suite, f"samples {count}", (AVERAGE,), records, data=data, merged=False)
        measure(suite, f"samples {count}", (CHAIN,), records, data=data)


def corruption(suite: Suite, records: Records) -> None:
    """All calibrators on the average, from examples that are worse than those of the test."""
    row = replace(AVERAGE, calibrators=("featcal", "surgery", "prob_surgery"))
    measure(suite, "corruption none", (row,), records, merged=False)
    for kind in CORRUPTIONS:
        data = corrupted(suite.data(), kind, 0)
        measure(suite, f"corruption {kind}", (row,), records, data=data, merged=False)


def sweeps(suite: Suite, records: Records) -> None:
    """FeatCal's settings, one at a time, on the average and with fewer examples."""
    data = suite.data(examples=SWEEP_EXAMPLES)
    for setting, values in SWEEPS.items():
        for value in values:
            changed = {setting: value}
            measure(
                suite,
                f"{setting} {value:g}",
                (AVERAGE,),
                records,
                data=data,
                calibration=changed,
                merged=False,
            )


def tuned(suite: Suite, records: Records, labels: Sequence[str] | None = None) -> None:
    """FeatCal with settings that the search on validation examples finds; on all of TUNED, or on `labels`."""
    _tuned(suite, records, labels, "tuned", "validation")


def tuned_without_labels(suite: Suite, records: Records, labels: Sequence[str] | None = None) -> None:
    """The same by the features of calibration examples that the search holds out: no labels are needed."""
    _tuned(suite, records, labels, "tuned without labels", "features")


def _tuned(
    suite: Suite,
    records: Records,
    labels: Sequence[str] | None,
    table: str,
    criterion: Literal["validation", "features"],
) -> None:
    few = suite.data(examples=SWEEP_EXAMPLES)
    tasks = {name: replace(task, calibration=few[name]) for name, task in suite.tasks.items()}
    sweeps = {f"calibrate.{setting}": list(values) for setting, values in TRIED.items()}
    for row in TUNED:
        if labels is not None and row.label not in labels:
            continue
        if (table, row.label, "featcal", 0) in records.entries:
            continue
        merge = "merge=" + json.dumps({"type": row.rule, **row.settings})
        asked = suite.spec(merge, 'calibrate={"type": "featcal"}')
        spec, curve = search(asked, suite.opened, tasks, sweeps, criterion=criterion)
        print(f"{table}: {row.label}: {curve.best}", flush=True)
        start = time.perf_counter()
        source = suite.calibrated(spec, suite.merged(spec, suite.data()), suite.data())[0]
        seconds = time.perf_counter() - start
        settings = {name: getattr(spec.calibrate[0].settings, name) for name in TRIED}
        records.add(Entry(table, row.label, "featcal", 0, suite.scores(source), seconds, settings))


def precisions(suite: Suite, records: Records) -> None:
    """What bfloat16 products and float64 sums change."""
    for name in PRECISIONS:
        measure(suite, f"precision {name}", (AVERAGE, CHAIN), records, sets=(f"precision={name}",))


def distance(suite: Suite, records: Records) -> None:
    """Merging experts that stopped on their way: nearer to the base and to each other, and less able."""
    for share in SHARES:
        table = f"share {share:g}"
        if share == 1:
            _known_of_all(suite, table, records)
        _with_experts(suite if share == 1 else suite.nearer(share), table, records)


def tasks(suite: Suite, records: Records) -> None:
    """Merging the first experts alone."""
    for count in COUNTS:
        if count == len(suite.tasks):
            _known_of_all(suite, f"tasks {count}", records)
        if count <= len(suite.tasks):
            _with_experts(suite.first(count), f"tasks {count}", records)


def rounds(suite: Suite, records: Records) -> None:
    """FeatCal on what FeatCal made: each round starts nearer to the experts."""
    for row in (AVERAGE, CHAIN):
        _rounds(suite, records, row, {f"rounds {number}": {} for number in ROUNDS})


def tuned_rounds(suite: Suite, records: Records, labels: Sequence[str] | None = None) -> None:
    """Rounds with the settings that `tuned` has found, by the anchor of the later ones."""
    for row in (AVERAGE, CHAIN):
        if labels is not None and row.label not in labels:
            continue
        found = records.entries.get(("tuned", row.label, "featcal", 0))
        if found is None:
            raise SpecError(f'no settings for "{row.label}" are on record: measure `tuned` first')
        for anchor in LATER_ANCHORS:
            later = {
                tuned_round(anchor, number): {**found.settings, "anchor": anchor} for number in ROUNDS[1:]
            }
            _rounds(suite, records, row, {"tuned": found.settings, **later})


def tuned_round(anchor: float, number: int) -> str:
    """The table of a later round's entry."""
    return f"anchor {anchor:g} in round {number}"


def _rounds(suite: Suite, records: Records, row: Row, tables: Mapping[str, Mapping[str, float]]) -> None:
    """One round after the other, each into its table and with its settings of FeatCal."""
    if all((table, row.label, "featcal", 0) in records.entries for table in tables):
        return
    data, merge = suite.data(), "merge=" + json.dumps({"type": row.rule, **row.settings})
    source = suite.merged(suite.spec(merge), data)
    for table, settings in tables.items():
        spec = suite.spec(merge, "calibrate=" + json.dumps({"type": "featcal", **settings}))
        start = time.perf_counter()
        source = suite.calibrated(spec, source, data)[0]
        seconds = time.perf_counter() - start
        if (table, row.label, "featcal", 0) not in records.entries:
            scores = suite.scores(source)
            records.add(Entry(table, row.label, "featcal", 0, scores, seconds, settings))


def _known_of_all(suite: Suite, table: str, records: Records) -> None:
    """Under this table too, what other parts have measured of the whole suite at defaults, to the same."""
    data = suite.data()
    if any(len(data[task]) != SAMPLES[-1] for task in data):
        return
    found = {("experts", "none"): "references", (AVERAGE.label, "none"): "rules"}
    calibrated = ((AVERAGE.label, "featcal"), (CHAIN.label, "none"), (CHAIN.label, "featcal"))
    found |= dict.fromkeys(calibrated, f"samples {SAMPLES[-1]}")
    for (row, calibrator), where in found.items():
        entry = records.entries.get((where, row, calibrator, 0))
        if entry is not None and (table, row, calibrator, 0) not in records.entries:
            records.add(replace(entry, table=table))


def _with_experts(suite: Suite, table: str, records: Records) -> None:
    if (table, "experts", "none", 0) not in records.entries:
        records.add(Entry(table, "experts", "none", 0, suite.scores_of_experts()))
    measure(suite, table, (AVERAGE, CHAIN), records)


def ablation(suite: Suite, records: Records) -> None:
    """Chain of Merges, part after part."""
    measure(suite, "ablation", ABLATION, records)


def seeds(suite: Suite, records: Records) -> None:
    """The headline rows by several draws of calibration examples."""
    for seed in SEEDS:
        measure(suite, "seeds", HEADLINE, records, seed=seed)


@dataclass(frozen=True)
class Apart:
    """How far merged models are from the experts, by row."""

    shift: dict[str, list[float]]
    """Merging Covariate Shift of each block's output: the 2-Wasserstein distance between Gaussians, over the
    root mean square of the expert's; mean over tasks."""
    cosines: dict[str, dict[str, float]]
    """Of what the merged model and each task's expert differ by from the base, over all tensors."""


def apart(suite: Suite) -> Apart:
    data, made = suite.data(), {}
    for row in HEADLINE:
        spec = suite.spec(f'merge={{"type": "{row.rule}"}}', 'calibrate={"type": "featcal"}')
        made[row.label] = suite.merged(spec, data)
        if row.calibrators:
            made[f"{row.label} + FeatCal"] = suite.calibrated(spec, made[row.label], data)[0]
    return Apart(
        {label: _shift(suite, source) for label, source in made.items()},
        {label: _cosines(suite.opened.models, source) for label, source in made.items()},
    )


def _cosines(models: Models, merged: CheckpointSource) -> dict[str, float]:
    products = {task: torch.zeros(3, dtype=torch.float64) for task in models.experts}
    for name in models.base.names():
        base = models.base.read(name)
        if not base.is_floating_point():
            continue
        ours = (merged.read(name).double() - base.double()).flatten()
        for task, expert in models.experts.items():
            theirs = (expert.read(name).double() - base.double()).flatten()
            products[task] += torch.stack([ours @ theirs, ours @ ours, theirs @ theirs])
    return {task: float(met / (a * b).sqrt().clamp_min(1e-30)) for task, (met, a, b) in products.items()}


def _shift(suite: Suite, source: CheckpointSource) -> list[float]:
    held: dict[str, HeldOut] = {
        name: HeldOut(task.validation, "validation") for name, task in suite.tasks.items() if task.validation
    }
    found: Any = measure_drift(
        suite.opened.models, {"merged": source}, held, examples=_SHIFT_EXAMPLES, split=False, frechet=True
    )
    tasks = [models["merged"].blocks for models in found.drift.values()]
    return [
        sum(block.frechet_relative or 0.0 for block in blocks) / len(blocks)
        for blocks in zip(*tasks, strict=True)
    ]


BY_ROW: Mapping[str, Callable[[Suite, Records, Sequence[str] | None], None]] = {
    "tuned": tuned,
    "tuned-without-labels": tuned_without_labels,
    "tuned-rounds": tuned_rounds,
}
"""Those that can be asked for some rows alone."""

ALL: Mapping[str, Callable[[Suite, Records], None]] = {
    "seeds": seeds,
    "ablation": ablation,
    "samples": samples,
    "distance": distance,
    "tasks": tasks,
    "rounds": rounds,
    "precisions": precisions,
    "sweeps": sweeps,
    "corruption": corruption,
}
