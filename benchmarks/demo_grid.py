"""Every merge rule and calibrator on the demo's real tasks, in one run: the table in docs/results.md.

    python benchmarks/demo_grid.py --out merging-demo

Base, experts, heads and examples are those of `merging demo`; each rule sees the same ones. The first row is
the base with each task's head, the second each expert on its own task."""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from merging.checkpoints.sink import StateDictSink
from merging.checkpoints.source import CheckpointSource, StateDictSource
from merging.components import calibrators, strategies
from merging.contracts.calibrator import Calibrator
from merging.data.task import CalibrationData
from merging.demo import SUITES, build
from merging.evaluation.evaluator import evaluate
from merging.pipeline import Pipeline
from merging.streaming import load_model

PARTS = {
    "chain": "none",
    "normalise": "none",
    "task_weights": False,
}  # Chain of Merges without its three parts

GRID: list[tuple[str, str, dict[str, Any], bool]] = [  # label, strategy, settings, whether FeatCal follows
    ("average", "average", {}, True),
    ("Task Arithmetic 0.3", "task_arithmetic", {"scale": 0.3}, True),
    ("TIES 20 %, scale 1", "ties", {}, True),
    ("RegMean 0.9", "regmean", {}, True),
    ("RegMean++ 0.95", "regmean_plus_plus", {}, True),
    ("Chain of Merges without its parts", "chain_of_merges", PARTS, False),
    ("... with the chain", "chain_of_merges", {**PARTS, "chain": "feed"}, False),
    (
        "... and normalised per token",
        "chain_of_merges",
        {**PARTS, "chain": "feed", "normalise": "token"},
        False,
    ),
    ("... and task weights: Chain of Merges", "chain_of_merges", {}, True),
    ("Chain of Merges, normalised per feature", "chain_of_merges", {"normalise": "feature"}, False),
    ("Chain of Merges, chain per block", "chain_of_merges", {"chain": "block"}, False),
    ("Chain of Merges, 0.95 as ridge", "chain_of_merges", {"shrink": 1.0, "ridge": 0.95}, False),
    ("Chain of Merges, shrink 0.9", "chain_of_merges", {"shrink": 0.9}, False),
    ("Chain of Merges, shrink 0.99", "chain_of_merges", {"shrink": 0.99}, False),
]


class Grid:
    """The suite, opened once."""

    def __init__(self, spec: Path) -> None:
        pipeline = Pipeline.from_spec(spec)
        self.models, self.tasks = pipeline.resolve().models, list(pipeline.tasks().values())
        self.data = CalibrationData({task.name: task.calibration for task in self.tasks if task.calibration})
        self.experts: dict[str, float] = {}

    def merged(self, name: str, settings: Mapping[str, Any]) -> CheckpointSource:
        sink = StateDictSink(self.models.base)
        with sink:
            strategies.get(name)(**settings).merge(self.models, self.data, sink)
        return StateDictSource(sink.tensors)

    def calibrated(self, merged: CheckpointSource, calibrator: Calibrator) -> CheckpointSource:
        sink = StateDictSink(self.models.base)
        with sink:
            calibrator.calibrate(merged, self.models, self.data, sink)
        return StateDictSource(sink.tensors)

    def scores(self, source: CheckpointSource, adapt: Any = None) -> dict[str, float]:
        backbone = self.models.backbone
        assert backbone is not None
        found = evaluate(load_model(backbone, source), backbone, self.tasks, adapt)
        return {task: score.value for task, score in found.items()}

    def of_experts(self) -> dict[str, float]:
        backbone = self.models.backbone
        assert backbone is not None
        for task in self.tasks:
            model = load_model(backbone, self.models.experts[task.name])
            self.experts[task.name] = evaluate(model, backbone, [task])[task.name].value
        return self.experts

    def line(self, label: str, scores: Mapping[str, float], seconds: float | None = None) -> str:
        share = sum(scores[task] / self.experts[task] for task in scores) / len(scores)
        numbers = [100 * score for score in scores.values()]
        cells = [f"{value:.1f}" for value in (*numbers, sum(numbers) / len(numbers), 100 * share)]
        return "| " + " | ".join([label, *cells, "" if seconds is None else f"{seconds:.1f}"]) + " |"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("merging-demo"))
    grid = Grid(build(parser.parse_args(arguments).out, SUITES["vision"]))
    grid.of_experts()
    names = [task.name for task in grid.tasks]
    print("| " + " | ".join(["method", *names, "mean", "% of experts", "seconds"]) + " |")
    print("|" + " --- |" * (len(names) + 4))
    print(grid.line("base", grid.scores(grid.models.base)))
    print(grid.line("experts", grid.experts))
    for label, name, settings, calibrate in GRID:
        start = time.perf_counter()
        merged = grid.merged(name, settings)
        print(grid.line(label, grid.scores(merged), time.perf_counter() - start), flush=True)
        if calibrate:
            start = time.perf_counter()
            calibrated = grid.calibrated(merged, calibrators.get("featcal")())
            print(
                grid.line(f"{label} + FeatCal", grid.scores(calibrated), time.perf_counter() - start),
                flush=True,
            )
        if name == "average":
            surgery = calibrators.get("surgery")()
            start = time.perf_counter()
            grid.calibrated(merged, surgery)
            print(
                grid.line(
                    f"{label} + Surgery (task known)",
                    grid.scores(merged, surgery.adapt),
                    time.perf_counter() - start,
                )
            )


if __name__ == "__main__":
    main()
