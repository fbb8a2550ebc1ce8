"""search: try the points of a grid, judge each without the test examples, take the best.

Every point is merged and calibrated in memory from the same opened models and the same examples.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from merging.checkpoints.sink import StateDictSink
from merging.checkpoints.source import CheckpointSource, StateDictSource
from merging.components import calibrators, strategies
from merging.contracts.backbone import Backbone
from merging.contracts.calibrator import adapting
from merging.contracts.method import Progress, silent
from merging.data.hashing import overlap
from merging.data.portion import Portion
from merging.data.task import CalibrationData, Examples, Task
from merging.devices import choose_device
from merging.errors import (
    CheckpointError,
    DataError,
    NumericalError,
    Problem,
    RuleError,
    SpecError,
    run_begun,
)
from merging.evaluation.metric import Adapt
from merging.evaluation.metrics import metric
from merging.layer_settings import LayerSettings
from merging.making import make_calibrators, make_merger, run_merger
from merging.opened import Opened
from merging.report.curve import MEANING, Criterion, Curve, CurvePoint
from merging.search_criteria import Entropy, FeatureDistance, Judge, ValidationScore
from merging.search_grid import axes_of, grid, specs_at
from merging.spec import PipelineSpec
from merging.streaming import load_model

HELD_OUT = 4
"""Every so manieth calibration example is held out of the fit, and judged on."""


def search(
    spec: PipelineSpec,
    opened: Opened,
    tasks: Mapping[str, Task],
    sweeps: Mapping[str, Sequence[Any]] | Sequence[str],
    *,
    criterion: Criterion | None = None,
    merge_only: bool = False,
    device: str = "auto",
    progress: Progress = silent,
) -> tuple[PipelineSpec, Curve]:
    """The spec with the best values in it, and the whole curve.

    `criterion`: without one, "validation" where every task has such examples, else "features".
    Raises SpecError or DataError before any work; a point that fails numerically is a point of no worth.
    """
    points = grid(axes_of(sweeps))
    specs = specs_at(spec, points)
    _refuse_misfits(specs, opened)
    chosen = criterion or _default(tasks)
    search = _Search(spec, opened, tasks, chosen, merge_only=merge_only, device=choose_device(device))
    tried, start = [], time.perf_counter()
    for number, (values, at) in enumerate(zip(points, specs, strict=True)):
        progress("search", number, len(points))
        with run_begun(CheckpointError):
            tried.append(search.point(values, at))
    progress("search", len(points), len(points))
    best = _best(tried, lower_is_better=search.judge.lower_is_better)
    curve = Curve(
        criterion=chosen,
        meaning=MEANING[chosen],
        examples={task: len(examples) for task, examples in search.judged.items()},
        judged_on=search.judged_on,
        points=tuple(tried),
        best=tried[best].values,
        seconds=time.perf_counter() - start,
    )
    return specs[best], curve


class _Search:
    """What the points share: the judge, the examples to fit on, and the last merge."""

    def __init__(
        self,
        spec: PipelineSpec,
        opened: Opened,
        tasks: Mapping[str, Task],
        criterion: Criterion,
        *,
        merge_only: bool,
        device: str,
    ) -> None:
        if opened.models.backbone is None:
            raise RuleError("a search has to run the merged models, and their architecture is not known")
        self._opened, self._backbone, self._device = opened, opened.models.backbone, device
        self._merge_only = merge_only
        methods: list[Any] = [strategies.get(spec.merge.type)]
        methods += [] if merge_only else [calibrators.get(one.type) for one in spec.calibrate]
        fitting = any("data" in method.needs for method in methods)
        named = {name: tasks[name] for name in opened.models.tasks}
        self.judged, self._fit, self.judged_on = _split(named, criterion, fitting=fitting)
        self._heads = {name: task.head for name, task in named.items() if task.head is not None}
        self.judge = _judge(criterion, opened, self._backbone, self.judged, named, device)
        self._last: tuple[object, CheckpointSource] | None = None

    def point(self, values: dict[str, Any], spec: PipelineSpec) -> CurvePoint:
        try:
            with torch.no_grad():
                result, adapt = self._made(spec)
                worth = self.judge.worth(load_model(self._backbone, result, device=self._device), adapt)
        except NumericalError as error:
            return CurvePoint(values=values, note=error.message)
        return CurvePoint(values=values, tasks=worth, mean=sum(worth.values()) / len(worth))

    def _made(self, spec: PipelineSpec) -> tuple[CheckpointSource, Adapt]:
        source = self._merged(spec)
        used = [] if self._merge_only else make_calibrators(spec, self._device, None)
        for calibrator in used:
            sink = self._sink(spec)
            with sink:
                calibrator.calibrate(source, self._opened.models, self._data(), self._opened.pinned(sink))
            source = StateDictSource(sink.tensors, "calibrated")
        return source, adapting(used)

    def _merged(self, spec: PipelineSpec) -> CheckpointSource:
        """Merged anew only where the merge itself differs from that of the point before."""
        weights = {task: ref.weight for task, ref in spec.experts.items()}
        key = (spec.merge.model_dump(mode="json"), weights)
        if self._last is None or self._last[0] != key:
            self._last = None
            merger = make_merger(spec, self._opened, self._device, None)
            models = self._opened.models.weighed(weights)
            sink = self._sink(spec)
            with sink:
                data = self._data() if "data" in merger.needs else None
                run_merger(merger, models, data, self._opened.pinned(sink))
            self._last = (key, StateDictSource(sink.tensors, "merged"))
        return self._last[1]

    def _data(self) -> CalibrationData:
        return CalibrationData(self._fit, self._heads)

    def _sink(self, spec: PipelineSpec) -> StateDictSink:
        dtype = None if spec.output.dtype == "base" else getattr(torch, spec.output.dtype)
        return StateDictSink(self._opened.models.base, dtype)


def _default(tasks: Mapping[str, Task]) -> Criterion:
    whole = all(
        task.validation is not None and not _lacks_head(task) and metric(task.metric).reads_examples
        for task in tasks.values()
    )
    return "validation" if tasks and whole else "features"


def _split(
    tasks: Mapping[str, Task], criterion: Criterion, *, fitting: bool
) -> tuple[dict[str, Examples], dict[str, Examples], str]:
    """Examples to judge on, examples to fit on, and what the former are called."""
    _refuse_lacking(tasks, criterion)
    calibration = {name: task.calibration for name, task in tasks.items() if task.calibration is not None}
    if criterion == "validation":
        validation = {name: task.validation for name, task in tasks.items() if task.validation is not None}
        return validation, calibration, "validation examples"
    if not fitting:
        return calibration, calibration, "calibration examples, on which nothing is fitted"
    few = [name for name, examples in calibration.items() if len(examples) < HELD_OUT]
    if few:
        raise DataError(
            f"a search holds every {HELD_OUT}th calibration example out of the fit, and {', '.join(few)} has "
            f"fewer than {HELD_OUT}",
            remedy="Give more calibration examples, or labelled validation examples.",
        )
    last = HELD_OUT - 1
    judged = {
        name: Portion(examples, lambda number: number % HELD_OUT == last, "held out")
        for name, examples in calibration.items()
    }
    fit = {
        name: Portion(examples, lambda number: number % HELD_OUT != last, "fitted")
        for name, examples in calibration.items()
    }
    return dict(judged), dict(fit), "held-out calibration examples"


def _refuse_lacking(tasks: Mapping[str, Task], criterion: Criterion) -> None:
    wanted = "validation" if criterion == "validation" else "calibration"
    problems = [
        Problem(f"tasks.{name}.{wanted}", f'missing: the criterion "{criterion}" judges on such examples')
        for name, task in tasks.items()
        if getattr(task, wanted) is None
    ]
    if criterion != "features":
        problems += [
            Problem(f"tasks.{name}.head", f'missing: the criterion "{criterion}" looks at predictions')
            for name, task in tasks.items()
            if (_lacks_head(task) if criterion == "validation" else task.head is None)
        ]
    if criterion == "validation":
        problems += [
            Problem(
                f"tasks.{name}.metric",
                f'"{task.metric.type}" has test data of its own, and these must not choose settings',
                'Search by the criterion "features".',
            )
            for name, task in tasks.items()
            if not metric(task.metric).reads_examples
        ]
    for name, task in tasks.items():
        if criterion == "validation" and task.validation is not None and task.test is not None:
            shared = overlap(task.validation, task.test)
            if shared:
                what = (
                    f"{shared} of {len(task.test)} test examples are among them: they would choose settings"
                )
                problems.append(Problem(f"tasks.{name}.validation", what, "Draw them from another split."))
    if problems:
        raise DataError("a search cannot judge its points", problems=problems)


def _lacks_head(task: Task) -> bool:
    return metric(task.metric).reads_head and task.head is None


def _judge(
    criterion: Criterion,
    opened: Opened,
    backbone: Backbone,
    judged: Mapping[str, Examples],
    tasks: Mapping[str, Task],
    device: str,
) -> Judge:
    if criterion == "validation":
        return ValidationScore(backbone, tasks)
    if criterion == "entropy":
        return Entropy(backbone, judged, tasks)
    return FeatureDistance(opened.models, backbone, judged, device)


def _refuse_misfits(specs: Sequence[PipelineSpec], opened: Opened) -> None:
    problems = [
        problem
        for spec in specs
        for problem in LayerSettings(spec.merge.layers).problems(opened.models, spec.merge.settings)
    ]
    if problems:
        raise SpecError("merge.layers does not fit the model", problems=list(dict.fromkeys(problems)))


def _best(points: Sequence[CurvePoint], *, lower_is_better: bool) -> int:
    """The first of the best points. Raises NumericalError if every point failed."""
    means = {number: point.mean for number, point in enumerate(points) if point.mean is not None}
    if not means:
        raise NumericalError(f"every point of the search failed; the first: {points[0].note}")
    sign = 1 if lower_is_better else -1
    return min(means, key=lambda number: (sign * means[number], number))
