"""Merge, calibrate and measure on a suite, entry after entry; what is measured is not measured again."""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from benchmarks.suites.kept import kept
from benchmarks.suites.rows import Row
from merging.checkpoints.folder import open_checkpoint
from merging.checkpoints.sink import StateDictSink
from merging.checkpoints.source import CheckpointSource, StateDictSource
from merging.contracts.calibrator import adapting
from merging.contracts.models import Models
from merging.data.task import CalibrationData, Task
from merging.evaluation.evaluator import evaluate
from merging.evaluation.metric import Adapt
from merging.making import make_calibrators, make_merger, run_merger
from merging.opened import Opened
from merging.pipeline import Pipeline
from merging.search import search
from merging.spec import PipelineSpec
from merging.streaming import load_model

_BATCH = 64


@dataclass(frozen=True)
class Entry:
    """One measurement: shares of right answers by task, seconds of the merge or of the calibration alone."""

    table: str
    row: str
    calibrator: str
    seed: int
    scores: Mapping[str, float]
    seconds: float = 0.0
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> tuple[str, str, str, int]:
        return self.table, self.row, self.calibrator, self.seed


class Records:
    """Entries in a file of JSON lines, which grows."""

    def __init__(self, file: Path) -> None:
        self._file = file
        file.parent.mkdir(parents=True, exist_ok=True)
        lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
        self.entries = {entry.key: entry for entry in (Entry(**json.loads(line)) for line in lines)}

    def add(self, entry: Entry) -> None:
        self.entries[entry.key] = entry
        with self._file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(entry)) + "\n")

    def of(self, table: str) -> list[Entry]:
        return [entry for entry in self.entries.values() if entry.table == table]


class Suite:
    """A built suite, opened once: its models, and its examples in memory."""

    def __init__(self, spec: Path, sets: Sequence[str] = ()) -> None:
        self._path, self._sets = spec, list(sets)
        self._drawn: dict[tuple[int, int | None], CalibrationData] = {}

    def spec(self, *sets: str) -> PipelineSpec:
        return Pipeline.from_spec(self._path, sets=[*self._sets, *sets]).spec

    @cached_property
    def _pipeline(self) -> Pipeline:
        return Pipeline(self.spec())

    @cached_property
    def opened(self) -> Opened:
        return self._pipeline.resolve()

    @cached_property
    def tasks(self) -> dict[str, Task]:
        return {name: kept(task, _BATCH) for name, task in self._pipeline.tasks().items()}

    def data(self, *, seed: int = 0, examples: int | None = None) -> CalibrationData:
        """Calibration examples, drawn by the seed: as many a task as the spec says, or `examples`."""
        if (seed, examples) not in self._drawn:
            asked = [] if examples is None else [_asking(task, examples) for task in self.tasks]
            pipeline = Pipeline(self.spec(f"seed={seed}", *asked))
            pipeline._opened = self.opened
            drawn = {name: kept(task, _BATCH).calibration for name, task in pipeline.tasks().items()}
            heads = {name: task.head for name, task in self.tasks.items() if task.head}
            self._drawn[seed, examples] = CalibrationData({k: v for k, v in drawn.items() if v}, heads)
        return self._drawn[seed, examples]

    def with_models(self, models: Models) -> Suite:
        """The same suite with other experts, or fewer: tasks without an expert are left out."""
        self.data()  # drawn once, so that both suites see the same
        other = copy.copy(self)
        other.opened = replace(self.opened, models=models)
        other.tasks = {name: task for name, task in self.tasks.items() if name in models.experts}
        other._drawn = {
            which: CalibrationData(
                {name: data[name] for name in data if name in models.experts},
                {name: head for name, head in data.heads.items() if name in models.experts},
            )
            for which, data in self._drawn.items()
        }
        return other

    def nearer(self, share: float) -> Suite:
        """The same suite with experts that went only that share of the way from the base.

        They are kept in memory, in float32."""
        base = self.opened.models.base
        experts: dict[str, CheckpointSource] = {}
        for name, expert in self.opened.models.experts.items():
            tensors = {key: base.read(key).float() for key in base.names()}
            for key, tensor in tensors.items():
                if tensor.is_floating_point() and key in expert.names():
                    tensors[key] = torch.lerp(tensor, expert.read(key).float(), share)
            experts[name] = StateDictSource(tensors, f'expert "{name}" at {share:g}')
        return self.with_models(replace(self.opened.models, experts=experts))

    def first(self, count: int) -> Suite:
        """The suite of its first `count` tasks."""
        models = self.opened.models
        names = list(models.experts)[:count]
        return self.with_models(
            replace(
                models,
                experts={name: models.experts[name] for name in names},
                weights={name: models.weights[name] for name in names},
            )
        )

    def searched(self, spec: PipelineSpec, sweep: Mapping[str, Sequence[Any]]) -> PipelineSpec:
        """The spec with the merge settings that do best on validation examples."""
        if not sweep:
            return spec
        tried = {f"merge.{setting}": list(values) for setting, values in sweep.items()}
        return search(spec, self.opened, self.tasks, tried, criterion="validation", merge_only=True)[0]

    def merged(self, spec: PipelineSpec, data: CalibrationData) -> CheckpointSource:
        sink = StateDictSink(self.opened.models.base)
        with sink:
            merger = make_merger(spec, self.opened, "cpu", None)
            run_merger(merger, self.opened.models, data, self.opened.pinned(sink))
        return StateDictSource(sink.tensors, "merged")

    def calibrated(
        self, spec: PipelineSpec, source: CheckpointSource, data: CalibrationData
    ) -> tuple[CheckpointSource, Adapt | None]:
        used = make_calibrators(spec, "cpu", None)
        for calibrator in used:
            sink = StateDictSink(self.opened.models.base)
            with sink:
                calibrator.calibrate(source, self.opened.models, data, self.opened.pinned(sink))
            source = StateDictSource(sink.tensors, "calibrated")
        return source, adapting(used)

    @torch.no_grad()
    def scores(
        self, source: CheckpointSource, adapt: Adapt | None = None, only: str | None = None
    ) -> dict[str, float]:
        backbone = self.opened.models.backbone
        assert backbone is not None
        tasks = [task for name, task in self.tasks.items() if only in (None, name)]
        found = evaluate(load_model(backbone, source), backbone, tasks, adapt)
        return {name: score.value for name, score in found.items()}

    def scores_of_experts(self) -> dict[str, float]:
        """Of each expert, on its own task."""
        experts = self.opened.models.experts
        return {task: self.scores(expert, only=task)[task] for task, expert in experts.items()}


def references(suite: Suite, joint: Path | None, records: Records) -> None:
    """The base and the joint model with every task's head, each expert on its own task."""
    table, base = "references", suite.opened.models.base
    own = {"base": lambda: suite.scores(base), "experts": suite.scores_of_experts}
    if joint is not None:
        own["joint model"] = lambda: suite.scores(open_checkpoint(joint, "joint"))
    for name, scored in own.items():
        if (table, name, "none", 0) not in records.entries:
            records.add(Entry(table, name, "none", 0, scored()))


def measure(
    suite: Suite,
    table: str,
    rows: Sequence[Row],
    records: Records,
    *,
    seed: int = 0,
    data: CalibrationData | None = None,
    calibration: Mapping[str, Any] | None = None,
    sets: Sequence[str] = (),
    merged: bool = True,
) -> None:
    """Every row, without and with each of its calibrators, merged once.

    `data`: what methods see, by default the draw of the seed. `calibration`: settings of the calibrators.
    `sets`: what else differs from the suite's spec, as `--set` has it. `merged`: False where only calibrators
    make a difference.
    """
    for row in rows:
        missing = [
            name
            for name in ("none",) * merged + tuple(row.calibrators)
            if (table, row.label, name, seed) not in records.entries
        ]
        if missing:
            seen = suite.data(seed=seed) if data is None else data
            for entry in _entries(suite, records, table, row, seed, missing, seen, calibration or {}, sets):
                records.add(entry)
                mean = 100 * sum(entry.scores.values()) / len(entry.scores)
                told = f"{table}: {row.label} + {entry.calibrator}: {mean:.1f} %, {entry.seconds:.1f} s"
                print(told, flush=True)


def _entries(
    suite: Suite,
    records: Records,
    table: str,
    row: Row,
    seed: int,
    names: Sequence[str],
    data: CalibrationData,
    calibration: Mapping[str, Any],
    sets: Sequence[str],
) -> Iterator[Entry]:
    known = records.entries.get((table, row.label, "none", seed))  # and with it what the search found
    given = row.settings if known is None else known.settings
    merge = "merge=" + json.dumps({"type": row.rule, **given})
    spec = suite.spec(merge, "calibrate=[]", f"seed={seed}", *sets)
    if known is None:
        spec = suite.searched(spec, row.sweep)
    settings = {name: getattr(spec.merge.settings, name) for name in (*row.settings, *row.sweep)}
    start = time.perf_counter()
    source = suite.merged(spec, data)
    seconds = time.perf_counter() - start
    for name in names:
        if name == "none":
            yield Entry(table, row.label, name, seed, suite.scores(source), seconds, settings)
            continue
        start = time.perf_counter()
        chosen = "calibrate=" + json.dumps({"type": name, **calibration})
        result, adapt = suite.calibrated(suite.spec(chosen, f"seed={seed}", *sets), source, data)
        seconds = time.perf_counter() - start
        yield Entry(table, row.label, name, seed, suite.scores(result, adapt), seconds, settings)


def _asking(task: str, examples: int) -> str:
    return f"tasks.{task}.calibration.examples={examples}"
