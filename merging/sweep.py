"""Sweep: the one front-to-back loop behind every layer-wise rule.

Shape letters: D inputs, O outputs of a linear (of all linears of one feed, stacked along O).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from merging.checkpoints.sink import CheckpointSink
from merging.checkpoints.source import CheckpointSource
from merging.contracts.backbone import Backbone, Batch
from merging.contracts.layer_rule import LayerRule
from merging.contracts.method import Progress, silent
from merging.contracts.models import Models
from merging.data.task import CalibrationData
from merging.errors import DataError, NumericalError, TracingError
from merging.measuring import Measure, NormKind, TokenWeights, norm_kind, split_by_weights
from merging.moments import Moments, NormMoments
from merging.normal_equations import NormalEquations, NormEquations, SolveHealth
from merging.records import DEFAULT_MEMORY, Records
from merging.streaming import StreamedModel
from merging.tracer import Block, BlockTracer, Feed, Layout, blocks_of, is_transposed


@dataclass
class SweepNotes:
    """What a sweep learned: health per feed, and what became of each parameter."""

    health: dict[str, SolveHealth] = field(default_factory=dict)  # block and first linear of the feed
    solved: list[str] = field(default_factory=list)  # names in the checkpoint
    left: dict[str, str] = field(default_factory=dict)  # name in the checkpoint -> why it was not solved


class Sweep:
    """One pass over all blocks. The student is streamed from `student`, solved block by block, and written to
    `sink`.

    Held at a time: one block of the student and one of an expert, their weights outside blocks, the sums of
    one block's feeds, and one batch of activations; what must wait lies in `Records`. So memory grows neither
    with depth nor with the number of experts."""

    def __init__(
        self,
        rule: LayerRule,
        student: CheckpointSource,
        models: Models,
        data: CalibrationData,
        sink: CheckpointSink,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        work: Path | None = None,
        activation_memory: int = DEFAULT_MEMORY,
        progress: Progress = silent,
    ) -> None:
        if models.backbone is None:
            raise TracingError(
                "a layer-wise method needs to know the architecture, and the base has no config it can read"
            )
        missing = [task for task in models.tasks if task not in data or not len(data[task])]
        if missing:
            raise DataError(
                f"no calibration examples for {', '.join(missing)}",
                remedy='Give each expert a "calibration" source under "tasks".',
            )
        self.rule, self.backbone, self.models, self.sink = rule, models.backbone, models, sink
        self.source, self.progress, self.notes = student, progress, SweepNotes()
        self._units = 1  # of progress, as last told
        self.records = Records(work, memory=activation_memory)
        names = models.base.names()
        self.student = StreamedModel(self.backbone, names, device=device, dtype=dtype)
        self.expert = StreamedModel(self.backbone, names, device=device, dtype=dtype)
        stacks = self.backbone.stacks(self.student.module)
        self.blocks = blocks_of(self.student.module, stacks)
        self._expert_blocks = blocks_of(self.expert.module, stacks)
        if not self.blocks:
            raise TracingError(f"{type(self.student.module).__name__} has no list of blocks to walk")
        self._batches: dict[str, Sequence[Batch]] = {task: data[task].batches() for task in models.tasks}
        self._forwards = {
            task: _Forwards(self.backbone, batches, device) for task, batches in self._batches.items()
        }
        walks = {"student": (self.student, self.blocks), "expert": (self.expert, self._expert_blocks)}
        self._tracers = {
            (who, task): BlockTracer(
                model.module, blocks, self._forwards[task], self.records, stream=f"{who} {task}"
            )
            for who, (model, blocks) in walks.items()
            for task in models.tasks
        }

    def run(self) -> SweepNotes:
        self.student.attach(self.source)
        self.student.load(without=[block.name for block in self.blocks])
        written: set[str] = set()
        try:
            with torch.no_grad():
                for index, block in enumerate(self.blocks):
                    self._block(index, block, written)
            self.progress("sweep", self._units, self._units)
        finally:
            self.records.close()
        for name in self.models.base.names():
            if name not in written:
                self.sink.write(name, self.source.read(name))
                self.notes.left.setdefault(name, self._reason(name))
        return self.notes

    def _block(self, index: int, block: Block, written: set[str]) -> None:
        self.student.load(block.name)
        layout = self._layout(index)
        solved: dict[str, Tensor] = {}
        if self.rule.chain == "feed":
            for number, feed in enumerate(layout.feeds):
                final = number == len(layout.feeds) - 1 and not self.rule.norms
                part = self._solve(index, Layout((feed,), ()), (number, len(layout.feeds)), final=final)
                self._take(part, solved)
            if self.rule.norms:
                self._take(self._solve(index, Layout((), layout.norms), (0, 1), final=True), solved)
        else:
            part = self._solve(index, layout, (0, 1), final=True)
            if self.rule.chain == "block":
                self._take(part, solved)
            else:
                solved.update(part)
        if index + 1 < len(self.blocks) and self.rule.inputs != "expert":
            self._advance(index)
        for name, tensor in solved.items():
            stored = self.student.stored[name]
            self.sink.write(stored, tensor)
            written.add(stored)
            self.notes.solved.append(stored)
        self.student.release(block.name)

    def _tell(self, index: int, task: int, part: tuple[int, int]) -> None:
        tasks = len(self.models.tasks)
        done = (index * part[1] + part[0]) * tasks + task
        self._units = len(self.blocks) * part[1] * tasks
        self.progress("sweep", done, self._units)

    def _layout(self, index: int) -> Layout:
        """Discovered on the first task's first batch; by the student's block, whoever's inputs are used
        later."""
        task = self.models.tasks[0]
        if self.rule.inputs == "expert":
            with self._expert_at(task, index):
                layout = self._tracers["expert", task].layout(index, 0)
        else:
            layout = self._tracers["student", task].layout(index, 0)
        weights = TokenWeights(self.backbone, self._batches[task][0], self.blocks[index], self.rule.reads_out)
        feeds = tuple(
            alike
            for feed in layout.feeds
            for part in split_by_weights(feed, weights)
            for alike in self._split_by_rule(index, part)
        )
        return Layout(feeds, layout.norms)

    def _split_by_rule(self, index: int, feed: Feed) -> list[Feed]:
        """The feed in parts whose linears are solved with the same settings."""
        parts: list[tuple[object, list[str]]] = []
        for linear in feed.linears:
            settings = getattr(self._rule_at(self.blocks[index], linear), "settings", None)
            for theirs, linears in parts:
                if theirs == settings:
                    linears.append(linear)
                    break
            else:
                parts.append((settings, [linear]))
        return [feed._replace(linears=tuple(linears)) for _, linears in parts]

    def _rule_at(self, block: Block, linear: str) -> LayerRule:
        return self.rule.at(self.student.stored[f"{block.name}.{linear}.weight"])

    def _take(self, part: dict[str, Tensor], solved: dict[str, Tensor]) -> None:
        for name, tensor in part.items():
            self.student.write_(name, tensor)
        solved.update(part)

    def _advance(self, index: int) -> None:
        """Run the block with its new weights and record what it answers."""
        for task in self.models.tasks:
            tracer = self._tracers["student", task]
            for batch in range(len(self._batches[task])):
                tracer.record(index, batch, tracer.run(index, tracer.call(index, batch), {}))

    def _solve(self, index: int, layout: Layout, part: tuple[int, int], *, final: bool) -> dict[str, Tensor]:
        """New tensors by name in the module, for these feeds and norms of the block.

        `part`: this is the i-th of n passes over the block; `final`: the last one, in which experts are
        recorded."""
        block = self.blocks[index]
        norms = layout.norms if self.rule.norms else ()
        feeds = layout.feeds
        systems = {feed: NormalEquations(feed.features, self._outputs(block, feed)) for feed in feeds}
        kinds = {name: norm_kind(block.module.get_submodule(name)) for name in norms}
        affine = {name: NormEquations(kind.features, shift=kind.shift) for name, kind in kinds.items()}
        for number, task in enumerate(self.models.tasks):
            self._tell(index, number, part)
            moments, norm_moments = self._measure(index, task, feeds, kinds, final)
            for feed, equations in systems.items():
                weight_OD, bias_O = self._stacked(self.models.experts[task], block, feed)
                self._rule_at(block, feed.linears[0]).add(equations, weight_OD, moments[feed])
                if self.rule.biases and bias_O is not None:
                    self.rule.add_bias(equations, weight_OD, bias_O, moments[feed])
            for name, norm in affine.items():
                scale_D, shift_D = self._norm(self.models.experts[task], block, name, kinds[name])
                self.rule.add_norm(norm, scale_D, shift_D, norm_moments[name])
        found: dict[str, Tensor] = {}
        for feed, equations in systems.items():
            found.update(self._solved_feed(block, feed, equations))
        for name, norm in affine.items():
            merged = self._norm(self.source, block, name, kinds[name])
            base = self._norm(self.models.base, block, name, kinds[name])
            scale_D, shift_D = self.rule.solve_norm(norm, merged, base)
            found[f"{block.name}.{name}.weight"] = scale_D - kinds[name].offset
            if shift_D is not None:
                found[f"{block.name}.{name}.bias"] = shift_D
        for name, tensor in found.items():
            if not bool(torch.isfinite(tensor).all()):
                raise NumericalError(f'the solution for "{name}" is not finite', remedy="Raise the ridge.")
        kept = self.models.kept
        return {name: tensor for name, tensor in found.items() if self.student.stored[name] not in kept}

    def _solved_feed(self, block: Block, feed: Feed, equations: NormalEquations) -> dict[str, Tensor]:
        merged_OD, merged_O = self._stacked(self.source, block, feed)
        base_OD, base_O = self._stacked(self.models.base, block, feed)
        weight_OD = self._rule_at(block, feed.linears[0]).solve(equations, merged_OD, base_OD)
        if equations.health is not None:
            self.notes.health[f"{block.name}.{feed.linears[0]}"] = equations.health
        bias_O = None
        if self.rule.biases and merged_O is not None and base_O is not None:
            bias_O = self.rule.solve_bias(equations, weight_OD, merged_O, base_O)
        found, start = {}, 0
        for linear in feed.linears:
            stop = start + _outputs(block.module, linear)
            part_OD = weight_OD[start:stop]
            turned = is_transposed(block.module.get_submodule(linear))
            found[f"{block.name}.{linear}.weight"] = part_OD.T.contiguous() if turned else part_OD
            if bias_O is not None and f"{block.name}.{linear}.bias" in self.student.stored:
                found[f"{block.name}.{linear}.bias"] = bias_O[start:stop]
            start = stop
        return found

    def _measure(
        self, index: int, task: str, feeds: Sequence[Feed], kinds: Mapping[str, NormKind], final: bool
    ) -> tuple[dict[Feed, Moments], dict[str, NormMoments]]:
        """Statistics of one task's inputs to the block's feeds and norms."""
        rule, block = self.rule, self.blocks[index]
        moments = {
            feed: Moments(feed.features, target=rule.targets, unit_tokens=rule.unit_tokens) for feed in feeds
        }
        norm_moments = {name: NormMoments(kind.features) for name, kind in kinds.items()}
        until = feeds[0].linears[0] if rule.chain == "feed" and feeds else None
        student, expert = self._tracers["student", task], self._tracers["expert", task]
        needs_expert = rule.targets or rule.inputs != "student"
        with self._expert_at(task, index) if needs_expert else _nothing():
            for number, batch in enumerate(self._batches[task]):
                weights = TokenWeights(self.backbone, batch, block, rule.reads_out)
                measure = Measure(block, moments, norm_moments, kinds, weights)
                try:
                    if rule.inputs == "expert":
                        output = expert.run(index, expert.call(index, number), measure.observers())
                    elif rule.inputs == "expert_on_student":
                        expert.run(index, student.call(index, number), measure.observers())
                        continue
                    elif rule.targets:
                        student.run(index, student.call(index, number), measure.keepers(), until=until)
                        output = expert.run(index, expert.call(index, number), measure.pairers())
                    else:
                        student.run(index, student.call(index, number), measure.observers(), until=until)
                        continue
                except NumericalError as error:
                    raise NumericalError(
                        f'{error} (block "{block.name}", task "{task}", batch {number})',
                        remedy="Check this expert's weights and this task's examples for overflow.",
                    ) from error
                if final and index + 1 < len(self.blocks):
                    expert.record(index, number, output)
        return moments, norm_moments

    @contextmanager
    def _expert_at(self, task: str, index: int) -> Iterator[None]:
        """The task's expert, with what lies outside its blocks and this one block loaded."""
        self.expert.attach(self.models.experts[task])
        self.expert.load(without=[block.name for block in self._expert_blocks])
        self.expert.load(self._expert_blocks[index].name)
        try:
            yield
        finally:
            self.expert.release()

    def _outputs(self, block: Block, feed: Feed) -> int:
        return sum(_outputs(block.module, linear) for linear in feed.linears)

    def _stacked(self, source: CheckpointSource, block: Block, feed: Feed) -> tuple[Tensor, Tensor | None]:
        """Weights of a feed's linears along O; biases too (zeros where one has none), None where none has."""
        weights, biases, any_bias = [], [], False
        for linear in feed.linears:
            name = f"{block.name}.{linear}"
            weight = _wide(source.read(self.student.stored[f"{name}.weight"]))
            weights.append(weight.T if is_transposed(block.module.get_submodule(linear)) else weight)
            stored = self.student.stored.get(f"{name}.bias")
            any_bias = any_bias or stored is not None
            biases.append(_wide(source.read(stored)) if stored else weights[-1].new_zeros(len(weights[-1])))
        return torch.cat(weights), torch.cat(biases) if any_bias else None

    def _norm(
        self, source: CheckpointSource, block: Block, name: str, kind: NormKind
    ) -> tuple[Tensor, Tensor | None]:
        """Scale as it multiplies the normalised input, and shift."""
        path = f"{block.name}.{name}"
        scale = _wide(source.read(self.student.stored[f"{path}.weight"])) + kind.offset
        shift = self.student.stored.get(f"{path}.bias")
        return scale, _wide(source.read(shift)) if shift else None

    def _reason(self, name: str) -> str:
        if name in self.models.kept or not self.models.base.spec(name).dtype.is_floating_point:
            return "copied from the base"
        inside = {stored: inside for inside, stored in self.student.stored.items()}.get(name)
        if inside is None:
            return "not part of the model that is walked"
        if not any(inside.startswith(f"{block.name}.") for block in self.blocks):
            return "outside the blocks"
        return "not a linear or norm that this method solves"


class _Forwards(Sequence[dict[str, Any]]):
    """Keyword arguments of the forward, made when a batch is wanted."""

    def __init__(self, backbone: Backbone, batches: Sequence[Batch], device: torch.device | str) -> None:
        self._backbone, self._batches, self._device = backbone, batches, device

    def __len__(self) -> int:
        return len(self._batches)

    def __getitem__(self, index: Any) -> Any:
        kwargs = self._backbone.forward_kwargs(self._batches[index])
        return {
            name: value.to(self._device) if isinstance(value, Tensor) else value
            for name, value in kwargs.items()
        }


def _outputs(module: nn.Module, linear: str) -> int:
    part = module.get_submodule(linear)
    return int(part.get_parameter("weight").shape[1 if is_transposed(part) else 0])


def _wide(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype in (torch.float32, torch.float64) else tensor.float()


@contextmanager
def _nothing() -> Iterator[None]:
    yield
