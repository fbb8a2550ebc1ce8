"""Sweep: the one front-to-back loop behind every layer-wise rule.

Shape letters: D inputs, O outputs of a linear (of all linears of one feed, stacked along O).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from merging.allocator import give_back, reusing
from merging.backbones.routed_experts import following, step_of
from merging.checkpoints.parts import Parts
from merging.checkpoints.sink import CheckpointSink
from merging.checkpoints.source import CheckpointSource
from merging.contracts.backbone import Batch
from merging.contracts.layer_rule import LayerRule
from merging.contracts.method import Progress, silent
from merging.contracts.models import Models
from merging.data.task import CalibrationData
from merging.errors import DataError, NumericalError, TracingError
from merging.fates import BUFFER, NOT_WALKED, NOTHING, SEVERAL, UNSEEN, copied_because, unsolved
from merging.feed_weights import FeedWeights, Stacked, answers, outputs, outputs_of
from merging.forwards import Forwards
from merging.lean import lean_
from merging.measuring import Measure, NormKind, TokenWeights, norm_kind, split_by_weights
from merging.moments import Moments, NormMoments, Pool, sums_dtype
from merging.normal_equations import NormalEquations, NormEquations, SolveHealth
from merging.ranks import ALONE, Ranks
from merging.records import Records
from merging.sharing import shared
from merging.solved_blocks import Solved, SolvedBlocks
from merging.stem import Tried
from merging.streaming import StreamedModel
from merging.tracer import Block, BlockTracer, Feed, Layout, blocks_of, is_transposed
from merging.walkable import look, refuse_unwalkable_stacks


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
        activation_memory: int | None = None,
        known: SolvedBlocks | None = None,
        ranks: Ranks = ALONE,
        progress: Progress = silent,
    ) -> None:
        """`known`: where solved blocks are kept, and those of an earlier run found."""
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
        self.rule, self.backbone, self.known = rule, models.backbone, known
        self._ranks = ranks
        self._parts = Parts(self.backbone.parts(models.base.names()))
        self.models, self.sink = self._parts.models(models), self._parts.sink(sink)
        self.source, self.progress, self.notes = self._parts.source(student), progress, SweepNotes()
        self._units = 1  # of progress, as last told
        self.records = Records(work, memory=activation_memory)
        self._dtype, self._pool = dtype, Pool()
        names = self.models.base.names()
        self.student = StreamedModel(self.backbone, names, device=device, dtype=dtype)
        self.expert = StreamedModel(self.backbone, names, device=device, dtype=dtype)
        for model in (self.student, self.expert):
            lean_(model.module)
        self._weights, self._answers = FeedWeights(self.student), answers
        self._batches: dict[str, Sequence[Batch]] = {
            task: shared(data[task].batches(), ranks, task) for task in models.tasks
        }
        every = self.backbone.stacks(self.student.module)
        self._seeing = {stack: self._tasks_that_see(stack) for stack in every}  # tasks whose data reach it
        stacks = tuple(stack for stack in every if self._seeing[stack])
        self.blocks = blocks_of(self.student.module, stacks)
        self._expert_blocks = blocks_of(self.expert.module, stacks)
        if not self.blocks:
            raise TracingError(f"{type(self.student.module).__name__} has no list of blocks to walk")
        refuse_unwalkable_stacks(self.backbone, every, self._batches[self._seeing[stacks[0]][0]][0])
        unreached = [stack for stack in every if not self._seeing[stack]]
        self._seen = look(self.backbone, every) or NOTHING
        self._unsolved = unsolved(rule, self.student.module, every, unreached, self._seen)
        self._forwards = {
            task: Forwards(self.backbone, batches, device, measured=True)
            for task, batches in self._batches.items()
        }
        walks = {"student": (self.student, self.blocks), "expert": (self.expert, self._expert_blocks)}
        tried = Tried()
        self._tracers = {
            (who, task): BlockTracer(
                model.module,
                blocks,
                self._forwards[task],
                self.records,
                stream=f"{who} {task}",
                tried=tried,
            )
            for who, (model, blocks) in walks.items()
            for task in models.tasks
        }

    def run(self) -> SweepNotes:
        self.student.attach(self.source)
        self.student.load(without=self._seeing)
        written: set[str] = set()
        try:
            with reusing(), torch.no_grad():
                for index, block in enumerate(self.blocks):
                    self._block(index, block, written)
            self.progress("sweep", self._units, self._units)
        finally:
            self.records.close()
            give_back()
        for name in self.models.base.names():
            if name not in written:
                self.sink.write(name, self.source.read(name))
                self.notes.left.setdefault(name, self._reason(name))
        self.notes.solved = self._parts.wholes(self.notes.solved)
        self.notes.left = {self._parts.whole(name): why for name, why in self.notes.left.items()}
        return self.notes

    def _tasks_that_see(self, stack: str) -> tuple[str, ...]:
        return tuple(task for task, batches in self._batches.items() if self.backbone.sees(batches[0], stack))

    def _block(self, index: int, block: Block, written: set[str]) -> None:
        self.student.load(block.name)
        if self.known is not None and index < self.known.count:
            solved = self._recalled(index, self.known.read(index))
        else:
            solved = self._solve_block(index, block)
            if self.known is not None and self._ranks.first:
                self.known.keep(index, Solved(solved, self._health_of(block)))
        if index + 1 < len(self.blocks) and self.rule.inputs != "expert":
            self._advance(index)
        for name, tensor in solved.items():
            stored = self.student.stored[name]
            self.sink.write(stored, tensor)
            written.add(stored)
            self.notes.solved.append(stored)
        self.student.release(block.name)
        del solved
        give_back()

    def _solve_block(self, index: int, block: Block) -> dict[str, Tensor]:
        """New tensors of the block, already taken by the student if the rule chains."""
        layout = self._layout(index)
        solved: dict[str, Tensor] = {}
        if self.rule.chain == "feed":
            steps = [tuple(feeds) for _, feeds in groupby(layout.feeds, key=partial(_step, block))]
            for number, feeds in enumerate(steps):
                final = number == len(steps) - 1 and not self.rule.norms
                step = layout._replace(feeds=feeds, norms=())
                part = self._solve(index, step, (number, len(steps)), final=final)
                self._take(part, solved)
            if self.rule.norms:
                step = layout._replace(feeds=())
                self._take(self._solve(index, step, (0, 1), final=True), solved)
        else:
            part = self._solve(index, layout, (0, 1), final=True)
            if self.rule.chain == "block":
                self._take(part, solved)
            else:
                solved.update(part)
        return solved

    def _recalled(self, index: int, block: Solved) -> dict[str, Tensor]:
        """A block that an earlier run has solved: only what later blocks are fed with is computed again."""
        if self.rule.chain != "none":
            self._take(block.tensors, {})
        if index + 1 < len(self.blocks) and (self.rule.targets or self.rule.inputs == "expert"):
            for task in self._seeing[self.blocks[index].stack]:
                tracer = self._tracers["expert", task]
                with self._expert_at(task, index):
                    for batch in range(len(self._batches[task])):
                        tracer.record(index, batch, tracer.run(index, tracer.call(index, batch), {}))
        for feed, health in block.notes["health"].items():
            self.notes.health[feed] = SolveHealth(**health)
        self._tell(index + 1, 0, (0, 1))
        return block.tensors

    def _health_of(self, block: Block) -> dict[str, Any]:
        mine = {f: h for f, h in self.notes.health.items() if f.startswith(f"{block.name}.")}
        return {"health": {feed: asdict(health) for feed, health in mine.items()}}

    def _tell(self, index: int, task: int, part: tuple[int, int]) -> None:
        tasks = len(self.models.tasks)  # an upper bound, where some of them do not reach all stacks
        done = (index * part[1] + part[0]) * tasks + task
        self._units = len(self.blocks) * part[1] * tasks
        self.progress("sweep", done, self._units)

    def _layout(self, index: int) -> Layout:
        """Discovered on the first task's first batch; by the student's block, whoever's inputs are used
        later."""
        task, runs = self._seeing[self.blocks[index].stack][0], self.blocks[index]
        if self.rule.inputs == "expert":
            runs = self._expert_blocks[index]
            with self._expert_at(task, index):
                layout = self._tracers["expert", task].layout(index, 0)
        else:
            layout = self._tracers["student", task].layout(index, 0)
        for linear in layout.several:  # of a block that is not like its stack's others
            for leaf in runs.module.get_submodule(linear)._parameters:
                self._unsolved[f"{runs.name}.{linear}.{leaf}"] = SEVERAL
        layout = layout.without(self._seen.fixed.get(runs.stack, ()))
        weights = TokenWeights(self.backbone, self._batches[task][0], runs, self.rule.reads_out)
        feeds = tuple(
            alike
            for feed in layout.feeds
            for part in split_by_weights(feed, weights)
            for alike in self._split_by_rule(index, part)
        )
        return layout._replace(feeds=feeds)

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
        return self.rule.at(self._parts.whole(self.student.stored[f"{block.name}.{linear}.weight"]))

    def _take(self, part: dict[str, Tensor], solved: dict[str, Tensor]) -> None:
        for name, tensor in part.items():
            self.student.write_(name, tensor)
        solved.update(part)

    def _advance(self, index: int) -> None:
        """Run the block with its new weights and record what it answers."""
        for task in self._seeing[self.blocks[index].stack]:
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
        systems = {feed: self._equations(block, feed) for feed in feeds}
        kinds = {name: norm_kind(block.module.get_submodule(name)) for name in norms}
        affine = {name: NormEquations(kind.features, shift=kind.shift) for name, kind in kinds.items()}
        seen: set[Feed | str] = set()  # those that some task has a token for; the others stay as they are
        for number, task in enumerate(self._seeing[block.stack]):
            self._tell(index, number, part)
            moments, norm_moments, loaded = self._measure(index, task, layout, kinds, final)
            for place, (feed, equations) in enumerate(systems.items()):
                owner, taken = self._ranks.owner(place), moments.pop(feed)  # freed as soon as it is folded in
                taken.share_(self._ranks, owner, self._dtype)
                if not taken.tokens:
                    continue
                seen.add(feed)
                if owner != self._ranks.rank:
                    continue
                expert = self.models.experts[task]
                weight_OD, bias_O = (
                    loaded.pop(feed) if feed in loaded else self._weights.of(expert, block, feed)
                )
                self._rule_at(block, feed.linears[0]).add(equations, weight_OD, taken)
                if self.rule.biases and bias_O is not None:
                    self.rule.add_bias(equations, weight_OD, bias_O, taken)
                taken.release()
            for name, norm in affine.items():
                norm_moments[name].share_(self._ranks, self._dtype)
                if not norm_moments[name].total:
                    continue
                seen.add(name)
                scale_D, shift_D = self._weights.norm(self.models.experts[task], block, name, kinds[name])
                self.rule.add_norm(norm, scale_D, shift_D, norm_moments[name])
            give_back()  # what lies free between arrays of one task is not what the next one needs
        self._pool.clear()
        give_back()
        found: dict[str, Tensor] = {}
        for place, feed in enumerate(feeds):
            equations = systems.pop(feed)
            if feed.features >= _WIDE:
                give_back()
            if feed in seen:
                found.update(self._solved_by(self._ranks.owner(place), block, feed, equations))
        for name, norm in affine.items():
            if name not in seen:
                continue
            merged = self._weights.norm(self.source, block, name, kinds[name])
            base = self._weights.norm(self.models.base, block, name, kinds[name])
            scale_D, shift_D = self.rule.solve_norm(norm, merged, base)
            found[f"{block.name}.{name}.weight"] = scale_D - kinds[name].offset
            if shift_D is not None:
                found[f"{block.name}.{name}.bias"] = shift_D
        for name, tensor in found.items():
            if not bool(torch.isfinite(tensor).all()):
                raise NumericalError(f'the solution for "{name}" is not finite', remedy=_steadier(self.rule))
        kept, wide = self.models.kept, sums_dtype(self._dtype)
        return {
            name: tensor.to(wide) for name, tensor in found.items() if self.student.stored[name] not in kept
        }

    def _equations(self, block: Block, feed: Feed) -> NormalEquations:
        reference_OD = None
        if not self.rule.targets:  # what the student has loaded, in whose digits the differences are taken
            held = self._weights.in_memory(self.source, block, feed)
            reference_OD, _ = held or self._weights.of(self.source, block, feed)
        return NormalEquations(feed.features, outputs(block, feed), reference_OD)

    def _solved_by(
        self, owner: int, block: Block, feed: Feed, equations: NormalEquations
    ) -> dict[str, Tensor]:
        """The feed's new tensors, which one process solves and tells the others."""
        mine = self._ranks.rank == owner
        found = self._solved_feed(block, feed, equations) if mine else {}
        if self._ranks.size == 1:
            return found
        about = {name: (tensor.shape, tensor.dtype) for name, tensor in found.items()}
        about, health = self._ranks.tell((about, equations.health), owner)
        if health is not None:
            self.notes.health[f"{block.name}.{feed.linears[0]}"] = health
        return {
            name: self._ranks.from_rank(
                found[name].contiguous() if mine else torch.empty(shape, dtype=dtype), owner
            )
            for name, (shape, dtype) in about.items()
        }

    def _solved_feed(self, block: Block, feed: Feed, equations: NormalEquations) -> dict[str, Tensor]:
        held = self._weights.in_memory(self.source, block, feed)
        merged_OD, merged_O = held or self._weights.of(self.source, block, feed)
        base_OD, base_O = self._weights.of(self.models.base, block, feed)
        weight_OD = self._rule_at(block, feed.linears[0]).solve(equations, merged_OD, base_OD)
        if equations.health is not None:
            self.notes.health[f"{block.name}.{feed.linears[0]}"] = equations.health
        bias_O = None
        if self.rule.biases and merged_O is not None and base_O is not None:
            bias_O = self.rule.solve_bias(equations, weight_OD, merged_O, base_O)
        found, start = {}, 0
        for linear in feed.linears:
            stop = start + outputs_of(block.module, linear)
            part_OD = weight_OD[start:stop]
            turned = is_transposed(block.module.get_submodule(linear))
            part = part_OD.T.contiguous() if turned else part_OD
            found[f"{block.name}.{linear}.weight"] = part.to(sums_dtype(self._dtype), copy=True)
            if bias_O is not None and f"{block.name}.{linear}.bias" in self.student.stored:
                found[f"{block.name}.{linear}.bias"] = bias_O[start:stop]
            start = stop
        return found

    def _measure(
        self, index: int, task: str, layout: Layout, kinds: Mapping[str, NormKind], final: bool
    ) -> tuple[dict[Feed, Moments], dict[str, NormMoments], dict[Feed, Stacked]]:
        """Statistics of one task's inputs to the block's feeds and norms; and the expert's weights, as far as
        they were loaded as they are stored."""
        rule, block = self.rule, self.blocks[index]
        moments = {
            feed: Moments(
                feed.features,
                target=rule.targets,
                answers=self._answers(block, feed) if rule.targets else 0,
                unit_tokens=rule.unit_tokens,
                pool=self._pool,
            )
            for feed in layout.feeds
        }
        norm_moments = {name: NormMoments(kind.features) for name, kind in kinds.items()}
        until = layout.last_of([*(feed.linears[0] for feed in layout.feeds), *kinds])
        runs = block if rule.inputs == "student" else self._expert_blocks[index]
        student, expert = self._tracers["student", task], self._tracers["expert", task]
        needs_expert = rule.targets or rule.inputs != "student"
        loaded: dict[Feed, Stacked] = {}
        with self._expert_at(task, index) if needs_expert else _nothing():
            for number, batch in enumerate(self._batches[task]):
                weights = TokenWeights(self.backbone, batch, runs, rule.reads_out)
                measure = Measure(block, moments, norm_moments, kinds, weights, layout.untouched)
                try:
                    if rule.inputs == "expert":
                        output = expert.run(index, expert.call(index, number), measure.observers())
                    elif rule.inputs == "expert_on_student":
                        expert.run(index, student.call(index, number), measure.observers(), until=until)
                        continue
                    elif rule.targets:
                        student.run(index, student.call(index, number), measure.keepers(), until=until)
                        with following(self._expert_blocks[index].module, block.module):
                            output = expert.run(
                                index,
                                expert.call(index, number),
                                measure.pairers(),
                                answers=measure.answers(self._expert_blocks[index].module),
                            )
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
            if needs_expert:
                source, held = self.models.experts[task], self._expert_blocks[index]
                found = ((feed, self._weights.in_memory(source, held, feed)) for feed in layout.feeds)
                loaded = {feed: stacked for feed, stacked in found if stacked is not None}
        return moments, norm_moments, loaded

    @contextmanager
    def _expert_at(self, task: str, index: int) -> Iterator[None]:
        """The task's expert, with what lies outside its blocks and this one block loaded."""
        self.expert.attach(self.models.experts[task])
        self.expert.load(without=self._seeing)
        self.expert.load(self._expert_blocks[index].name)
        try:
            yield
        finally:
            self.expert.release()

    def _reason(self, name: str) -> str:
        if copied := copied_because(self.models, name):
            return copied
        inside = self.student.inside.get(name)
        return NOT_WALKED if inside is None else self._unsolved.get(inside, BUFFER) or UNSEEN


_WIDE = 2048  # features of a feed whose solve is the peak of a run


def _step(block: Block, feed: Feed) -> str:
    return step_of(block.module, feed.linears[0])


@contextmanager
def _nothing() -> Iterator[None]:
    yield


def _steadier(rule: LayerRule) -> str:
    """What to do where a solve overflows: what pulls or damps more, unless that is strong already."""
    settings = getattr(rule, "settings", None)
    ridge, shrink = getattr(settings, "ridge", None), getattr(settings, "shrink", None)
    if isinstance(ridge, int | float) and ridge < _STRONG:
        return f'Raise "ridge", which is {ridge:g}.'
    if isinstance(shrink, int | float) and shrink > 0:
        return f'Lower "shrink", which is {shrink:g}, or give more calibration examples.'
    return (
        "Its weights in base and experts, or its inputs, are too large: `merging compare BASE MODEL` shows "
        "which expert is far from the base."
    )


_STRONG = 1.0  # a ridge that outweighs what a task's examples say
