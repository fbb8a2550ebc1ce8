"""Plan: what a run will do, with what, and what it will cost. Headers and configs are read, no weights."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from pydantic import Field
from torch import nn

from merging.calibrators.feature_correction import FeatureCorrector
from merging.checkpoints.parts import parts_seen
from merging.components import calibrators, strategies
from merging.contracts.layer_rule import LayerRule
from merging.contracts.merger import TensorMerger
from merging.contracts.method import Method
from merging.contracts.vectors import BLOCK_ELEMENTS
from merging.evaluation.evaluator import is_scored
from merging.fates import fates, foreseen
from merging.layer_settings import LayerSettings
from merging.opening import Opened
from merging.records import DEFAULT_MEMORY
from merging.report.entry import Entry
from merging.report.solver import ParameterFate
from merging.report.stages import resident
from merging.spec import Component, OutputSpec, PipelineSpec
from merging.strategies.ada_merging import AdaMerging
from merging.strategies.fisher import Fisher
from merging.tracer import Block, blocks_of, is_linear, is_transposed

if TYPE_CHECKING:
    from merging.data.task import Task
    from merging.pipeline import Pipeline


class ModelPlan(Entry):
    """One model that is read."""

    model: str
    path: str
    tensors: int
    parameters: int
    bytes: int
    coefficient: float | None = Field(
        default=None, description="Its factor in the result, where there is such a thing."
    )


class TaskPlan(Entry):
    """Examples of one task."""

    calibration_asked: int | None = None
    calibration_used: int = 0
    validation_used: int = 0
    test_used: int = 0
    head: str = ""
    used_for: str = ""


class StepPlan(Entry):
    """One step of the run."""

    step: str
    method: str
    settings: dict[str, Any] = {}
    paper: str = ""
    needs: tuple[str, ...] = ()
    memory_law: str = ""
    peak_bytes: int = Field(description="Estimate of the most memory the process will hold.")
    solved: int = Field(default=0, description="Tensors that are solved in closed form.")
    unreached: tuple[str, ...] = Field(
        default=(), description="Stacks that no example reaches: not calibrated (n = 0)."
    )


class LayerPlan(Entry):
    """One entry of `layers`."""

    match: str
    tensors: int = Field(description="How many of the merged tensors it matches.")
    leave_out: bool | None = None
    settings: dict[str, Any] = {}


class Plan(Entry):
    """What will be done."""

    base: ModelPlan
    experts: dict[str, ModelPlan]
    backbone: str
    stacks: dict[str, int] = Field(description="Stack -> number of blocks.")
    steps: tuple[StepPlan, ...]
    layers: tuple[LayerPlan, ...] = Field(
        default=(), description="Where the merge rule's settings differ; later entries win."
    )
    tasks: dict[str, TaskPlan] = {}
    storage_dtype: str
    compute_dtype: str = "float32 or wider"
    device: str
    output: str
    disk_bytes: int = Field(description="Size of what is written.")
    disk_free_bytes: int
    peak_bytes: int
    kept: tuple[str, ...] = Field(default=(), description="Tensors that stay the base's.")
    parameters: dict[str, ParameterFate] = Field(
        default={}, description="What will become of each stored tensor, if tokens reach all modules."
    )
    notes: tuple[str, ...] = ()


def make_plan(pipeline: Pipeline) -> Plan:
    """Everything of a run that can be said beforehand."""
    from merging.running import choose_device

    spec, opened, tasks = pipeline.spec, pipeline.resolve(), pipeline.tasks()
    rule = strategies.get(spec.merge.type)
    factors = rule.coefficients(spec.merge.settings, opened.models.weights) or {}
    shape = _Shape(opened)
    steps = [_step("merge", spec.merge, rule, shape, tasks)]
    steps += [_step("calibrate", one, calibrators.get(one.type), shape, tasks) for one in spec.calibrate]
    if any(task.test is not None or is_scored(task) for task in tasks.values()):
        evaluated = 3 if spec.calibrate else 2
        peak = shape.runtime + evaluated * shape.parameters * 4
        steps.append(StepPlan(step="evaluate", method="scores and drift", peak_bytes=peak))
    checkpoints = 1 + bool(spec.calibrate)
    output = str(spec.output.path or "")
    return Plan(
        base=_model(opened, "base", None),
        experts={task: _model(opened, f'expert "{task}"', factors.get(task)) for task in opened.models.tasks},
        backbone=opened.models.backbone.name
        if opened.models.backbone is not None
        else "none: no config.json",
        stacks=shape.stacks,
        steps=tuple(steps),
        layers=_layers(spec.merge, opened),
        tasks={name: _task(task, needs_data=_needs_data(pipeline)) for name, task in tasks.items()},
        storage_dtype=_storage(spec.output.dtype, opened),
        device=choose_device(spec.device),
        output=output,
        disk_bytes=checkpoints * _delivered_bytes(spec.output, opened),
        disk_free_bytes=_free(Path(output)) if output else 0,
        peak_bytes=max(step.peak_bytes for step in steps),
        kept=tuple(sorted(opened.models.kept)),
        parameters=_fates(spec, opened, shape, tasks),
        notes=tuple(pipeline.validate()),
    )


def _fates(
    spec: PipelineSpec, opened: Opened, shape: _Shape, tasks: Mapping[str, Task]
) -> dict[str, ParameterFate]:
    """Those of the run's result: with calibrators, what any of them solves, and what the last one says."""
    solved: list[str] = []
    left: dict[str, str] = {}
    chosen: list[tuple[type[Method], Component]] = [
        (calibrators.get(one.type), one) for one in spec.calibrate
    ]
    for method, asked in chosen or [(strategies.get(spec.merge.type), spec.merge)]:
        if issubclass(method, LayerRule):
            now, left = shape.solved_by(method(asked.settings), tasks)
            solved += now
        elif issubclass(method, FeatureCorrector):
            left = dict.fromkeys(opened.models.base.names(), f"{asked.type} leaves the weights as they are")
    parts = parts_seen(opened.models, strategies.get(spec.merge.type))
    return fates(opened.models, parts, LayerSettings(spec.merge.layers), set(solved), left)


def _layers(merge: Component, opened: Opened) -> tuple[LayerPlan, ...]:
    counts = LayerSettings(merge.layers).counts(opened.models)
    return tuple(
        LayerPlan(match=entry.match, tensors=count, leave_out=entry.leave_out, settings=entry.changes)
        for entry, count in zip(merge.layers, counts, strict=True)
    )


class _Shape:
    """Sizes of the model, from headers and the skeleton."""

    def __init__(self, opened: Opened) -> None:
        base = opened.models.base
        self.runtime = resident()  # Python, torch and transformers, as imported for this plan
        self.experts = len(opened.models.tasks)
        self.parameters = sum(base.spec(name).elements for name in base.names())
        self.largest = max((base.spec(name).elements for name in base.names()), default=0)
        self.blocks: tuple[Block, ...] = ()
        self.outside = 0
        self.models, self.model = opened.models, nn.Module()
        self.backbone = backbone = opened.models.backbone
        if backbone is not None:
            self.model = backbone.skeleton()
            self.blocks = blocks_of(self.model, backbone.stacks(self.model))
            inside = sum(_elements(block.module) for block in self.blocks)
            self.outside = _elements(self.model) - inside

    @property
    def stacks(self) -> dict[str, int]:
        counts: dict[str, int] = {}
        for block in self.blocks:
            counts[block.stack] = counts.get(block.stack, 0) + 1
        return counts

    def unreached(self, tasks: Mapping[str, Task]) -> tuple[str, ...]:
        """Stacks of which no task has an example."""
        given = [task.calibration.batches()[0] for task in tasks.values() if task.calibration]
        if self.backbone is None or not given:
            return ()
        return tuple(
            stack for stack in self.stacks if not any(self.backbone.sees(batch, stack) for batch in given)
        )

    def solved_by(self, rule: LayerRule, tasks: Mapping[str, Task]) -> tuple[list[str], dict[str, str]]:
        """Stored tensors that the rule will solve, and why it leaves the others."""
        return foreseen(rule, self.models, self.model, self.unreached(tasks))

    def sweep_bytes(self, activations: int) -> int:
        """Two models outside their blocks, two blocks, the sums of a block's feeds, the solve's copies, a
        batch."""
        block = max((_elements(block.module) for block in self.blocks), default=0)
        feeds = max((_feed_bytes(block.module) for block in self.blocks), default=0)
        return self.runtime + 2 * 4 * (self.outside + block) + feeds + activations


def _feed_bytes(module: nn.Module) -> int:
    """Sums of a block's feeds: linears of one parent and width are taken to share one, their output to have
    its own."""
    groups: dict[tuple[str, int], list[int]] = {}
    for name, child in module.named_modules():
        if is_linear(child):
            outputs, inputs = child.get_parameter("weight").shape
            if is_transposed(child):
                outputs, inputs = inputs, outputs
            groups.setdefault((name.rpartition(".")[0], inputs), []).append(outputs)
    held = solving = 0
    for (_, width), widths in groups.items():
        feeds = 2 if len(widths) > 3 else 1
        square, rows = width * width, sum(widths) * width
        held += feeds * square * (4 + 4 + 8) + rows * 8
        solving = max(solving, 3 * square * 8 + 4 * rows * 8)
    return held + solving


def _step(step: str, asked: Component, method: Any, shape: _Shape, tasks: Mapping[str, Task]) -> StepPlan:
    solved = 0
    unreached: tuple[str, ...] = ()
    if issubclass(method, LayerRule):
        widest = max(
            (len(task.calibration.batches()[0]) for task in tasks.values() if task.calibration), default=0
        )
        peak = shape.sweep_bytes(256 << 20 if widest else 0)
        unreached = shape.unreached(tasks)
        solved = len(shape.solved_by(method(asked.settings), tasks)[0])
    elif issubclass(method, Fisher):
        peak = shape.runtime + 3 * 4 * shape.parameters + DEFAULT_MEMORY
    elif issubclass(method, AdaMerging):
        peak = shape.runtime + (shape.experts + 3) * 4 * shape.parameters
    elif issubclass(method, FeatureCorrector):
        peak = shape.runtime + 4 * shape.parameters
    elif "low rank" in method.needs:
        peak = shape.runtime + 4 * 8 * shape.largest
    elif issubclass(method, TensorMerger) and not all(
        method(settings).elementwise for settings in asked.all_settings()
    ):
        peak = shape.runtime + (shape.experts + 4) * 8 * shape.largest
    else:
        peak = shape.runtime + (shape.experts + 4) * 8 * min(shape.largest, BLOCK_ELEMENTS)
    return StepPlan(
        step=step,
        method=asked.type,
        settings=asked.settings.model_dump(mode="json"),
        paper=method.paper,
        needs=tuple(sorted(method.needs)),
        memory_law=method.memory,
        peak_bytes=peak,
        solved=solved,
        unreached=unreached,
    )


def _model(opened: Opened, role: str, coefficient: float | None) -> ModelPlan:
    models = opened.models
    source = (
        models.base if role == "base" else models.experts[role.removeprefix('expert "').removesuffix('"')]
    )
    specs = [source.spec(name) for name in source.names()]
    given = opened.inputs[role]
    return ModelPlan(
        model=given.name,
        path=str(given.path),
        tensors=len(specs),
        parameters=sum(one.elements for one in specs),
        bytes=sum(one.bytes for one in specs),
        coefficient=coefficient,
    )


def _task(task: Task, *, needs_data: bool) -> TaskPlan:
    uses = [
        *(["statistics"] if task.calibration is not None and needs_data else []),
        *(["scores"] if is_scored(task) else []),
        *(["drift"] if task.test is not None or task.calibration is not None else []),
    ]
    return TaskPlan(
        calibration_asked=task.calibration.asked if task.calibration is not None else None,
        calibration_used=len(task.calibration) if task.calibration is not None else 0,
        validation_used=len(task.validation) if task.validation is not None else 0,
        test_used=len(task.test) if task.test is not None else 0,
        head=" x ".join(map(str, task.head.shape)) if task.head is not None else "",
        used_for=", ".join(uses),
    )


def _needs_data(pipeline: Pipeline) -> bool:
    spec = pipeline.spec
    methods = [strategies.get(spec.merge.type), *(calibrators.get(one.type) for one in spec.calibrate)]
    return any("data" in method.needs for method in methods)


def _storage(asked: str, opened: Opened) -> str:
    if asked != "base":
        return asked
    base = opened.models.base
    kinds = {str(base.spec(name).dtype).removeprefix("torch.") for name in base.names()}
    return ", ".join(sorted(kinds))


def _delivered_bytes(output: OutputSpec, opened: Opened) -> int:
    """Of one checkpoint; of an adapter at least: what else has changed is not known beforehand."""
    if output.form == "model":
        return _stored_bytes(output.dtype, opened)
    rank = output.adapter_rank if isinstance(output.adapter_rank, int) else 0
    itemsize = 4 if output.dtype == "base" else getattr(torch, output.dtype).itemsize
    base = opened.models.base
    shapes = [base.spec(name).shape for name in base.names()]
    return sum(min(rank, *shape) * sum(shape) * itemsize for shape in shapes if len(shape) == 2)


def _stored_bytes(asked: str, opened: Opened) -> int:
    base = opened.models.base
    total = 0
    for name in base.names():
        spec = base.spec(name)
        floating = asked != "base" and spec.dtype.is_floating_point
        total += spec.elements * getattr(torch, asked).itemsize if floating else spec.bytes
    return total


def _free(path: Path) -> int:
    while not path.exists():
        path = path.parent
    return shutil.disk_usage(path).free


def _elements(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
