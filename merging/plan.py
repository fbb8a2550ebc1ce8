"""Plan: what a run will do, with what, and what it will cost. Headers and configs are read, and the first
rows of each matrix."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field
from torch import nn

from merging.calibrators.feature_correction import FeatureCorrector
from merging.checkpoints.parts import parts_seen
from merging.components import calibrators, strategies
from merging.contracts.layer_rule import LayerRule
from merging.contracts.method import Method, Progress, silent
from merging.costs.budget import Choice, choose
from merging.costs.probe import Rates, probe
from merging.costs.steps import Step, Steps
from merging.distances import distance
from merging.evaluation.evaluator import is_scored
from merging.fates import fates, foreseen
from merging.layer_settings import LayerSettings
from merging.opened import Opened
from merging.opening_again import opens_plainly
from merging.report.entry import Entry
from merging.report.solver import ParameterFate
from merging.report.stages import resident
from merging.room import free_bytes
from merging.spec import Component, PipelineSpec
from merging.tracer import Block, blocks_of
from merging.walkable import stacks_walked
from merging.want_of_memory import longest
from merging.working_folder import working_folder

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
    distance: float | None = Field(
        default=None,
        description="Of its matrices to the base's, relative to these; from the first rows of each.",
    )
    cosine: float | None = Field(default=None, description="Of its matrices and the base's, likewise.")


class TaskPlan(Entry):
    """Examples of one task."""

    calibration_asked: int | None = None
    calibration_used: int = 0
    longest: int = Field(
        default=0, description='Tokens of the longest calibration example, after the cut at "max_length".'
    )
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
    device_bytes: int = Field(default=0, description="The same of the device, where that is not the CPU.")
    scratch_bytes: int = Field(default=0, description="Disk used while it works, beside the result, at most.")
    examples: int = Field(default=0, description="Calibration examples it looks at.")
    batch: int = Field(default=0, description="Examples in a batch of those, at most.")
    seconds: float | None = Field(
        default=None, description="Estimate, by what this machine did in half a second; within a factor of 2."
    )
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
    scratch_bytes: int = Field(default=0, description="What is needed for a while beside that.")
    disk_free_bytes: int
    peak_bytes: int
    memory_bytes: int | None = Field(
        default=None, description="What the spec allows; none if it says nothing."
    )
    limits: dict[str, int] = Field(default={}, description="What was chosen to keep to it.")
    start_bytes: int = Field(default=0, description="Of the peak: Python and libraries, measured now.")
    seconds: float | None = Field(default=None, description="Of all steps, without starting Python.")
    kept: tuple[str, ...] = Field(default=(), description="Tensors that stay the base's.")
    parameters: dict[str, ParameterFate] = Field(
        default={}, description="What will become of each stored tensor, if tokens reach all modules."
    )
    notes: tuple[str, ...] = ()


def make_plan(pipeline: Pipeline, *, read_weights: bool = False, progress: Progress = silent) -> Plan:
    """Everything of a run that can be said beforehand. `read_weights`: as for `Pipeline.validate`."""
    from merging.devices import choose_device

    spec, before = pipeline.spec, resident()
    opened, tasks = pipeline.resolve(), pipeline.tasks()
    start = before if not _has_data(tasks) and opens_plainly(spec) else resident()
    rule = strategies.get(spec.merge.type)
    factors = rule.coefficients(spec.merge.settings, opened.models.weights) or {}
    planned = Steps(spec, opened, tasks)
    choice = choose(planned, spec.memory, start)
    shape = _Shape(opened)
    output = str(spec.output.path or "")
    rates = probe(Path(output) if output else working_folder())
    device = choose_device(spec.device)
    steps = [_step(one, start, choice, rates, shape, tasks, device) for one in planned.costs(choice)]
    checkpoints = 1 + bool(spec.calibrate)
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
        device=device,
        output=output,
        disk_bytes=checkpoints * planned.delivered_bytes,
        disk_free_bytes=free_bytes(Path(output)) if output else 0,
        scratch_bytes=max(step.scratch_bytes for step in steps),
        peak_bytes=max(step.peak_bytes for step in steps),
        memory_bytes=spec.memory,
        limits=choice.told(),
        start_bytes=start,
        seconds=sum(step.seconds or 0.0 for step in steps),
        kept=tuple(sorted(opened.models.kept)),
        parameters=_fates(spec, opened, shape, tasks),
        notes=tuple(pipeline.validate(read_weights=read_weights, progress=progress)),
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
    """The model's skeleton, and what methods will make of it."""

    def __init__(self, opened: Opened) -> None:
        self.blocks: tuple[Block, ...] = ()
        self.models, self.model = opened.models, nn.Module()
        self.backbone = backbone = opened.models.backbone
        if backbone is not None:
            self.model = backbone.skeleton()
            self.blocks = blocks_of(self.model, stacks_walked(backbone, self.model))

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


def _step(
    step: Step,
    start: int,
    choice: Choice,
    rates: Rates,
    shape: _Shape,
    tasks: Mapping[str, Task],
    device: str,
) -> StepPlan:
    asked, method = step.asked, step.method
    found = StepPlan(
        step=step.name,
        method=asked.type if asked is not None else "scores and drift",
        peak_bytes=int(start + step.cost.memory),
        device_bytes=0 if device == "cpu" else int(step.cost.device),
        scratch_bytes=int(step.cost.scratch),
        seconds=round(rates.seconds(step.cost.work), 3),
    )
    if asked is None or method is None:
        return found
    needs_data = "data" in method.needs
    more: dict[str, Any] = {
        "settings": asked.settings.model_dump(mode="json"),
        "paper": method.paper,
        "needs": tuple(sorted(method.needs)),
        "memory_law": method.memory,
        "examples": sum(len(task.calibration) for task in tasks.values() if task.calibration and needs_data),
        "batch": _batch(tasks, choice) if needs_data else 0,
    }
    if isinstance(method, LayerRule):
        more |= {
            "unreached": shape.unreached(tasks),
            "solved": len(shape.solved_by(method, tasks)[0]),
        }
    return found.model_copy(update=more)


def _batch(tasks: Mapping[str, Task], choice: Choice) -> int:
    """Examples in a batch, at most."""
    given = [task.calibration for task in tasks.values() if task.calibration is not None]
    sizes = (choice.batch if one.automatic and choice.batch else one.batch_size for one in given)
    return max((min(size, len(one)) for size, one in zip(sizes, given, strict=True)), default=0)


def _has_data(tasks: Mapping[str, Task]) -> bool:
    return any(task.calibration or task.test or task.validation for task in tasks.values())


def _model(opened: Opened, role: str, coefficient: float | None) -> ModelPlan:
    models = opened.models
    source = (
        models.base if role == "base" else models.experts[role.removeprefix('expert "').removesuffix('"')]
    )
    specs = [source.spec(name) for name in source.names()]
    given = opened.inputs[role]
    apart = None if role == "base" else distance(models, source)
    return ModelPlan(
        model=given.name,
        path=str(given.path),
        tensors=len(specs),
        parameters=sum(one.elements for one in specs),
        bytes=sum(one.bytes for one in specs),
        coefficient=coefficient,
        distance=None if apart is None else round(apart.relative, 6),
        cosine=None if apart is None else round(apart.cosine, 6),
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
        longest=longest(task.calibration),
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
