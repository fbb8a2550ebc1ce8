"""The steps of a run, each with what it will cost, from headers and from what the methods say."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from merging.components import calibrators, strategies
from merging.costs.cost import Cost, Work
from merging.costs.memory import WORKSPACE
from merging.costs.sizes import Sizes, Walk
from merging.costs.sizing import delivered_bytes, sizes_of, walk_of
from merging.evaluation.drift import EXAMPLES
from merging.evaluation.evaluator import is_scored
from merging.limits import Limits
from merging.spec import Component, PipelineSpec

if TYPE_CHECKING:
    from merging.contracts.method import Method
    from merging.costs.budget import Choice
    from merging.data.task import Examples, Task
    from merging.opened import Opened


@dataclass(frozen=True)
class Step:
    """`asked` and `method` are None for the evaluation."""

    name: str
    cost: Cost
    asked: Component | None = None
    method: Method | None = None

    @property
    def title(self) -> str:
        return f"{self.name} ({self.asked.type})" if self.asked is not None else self.name


class Steps:
    """What the spec asks for, one after the other."""

    def __init__(self, spec: PipelineSpec, opened: Opened, tasks: Mapping[str, Task]) -> None:
        self._spec, self._opened, self._tasks = spec, opened, tasks
        self.delivered_bytes = delivered_bytes(opened.models.base, spec.output)  # of one checkpoint

    def costs(self, choice: Choice) -> list[Step]:
        """If the run does it like this."""
        sizes = self._limited(choice.limits, choice.batch)
        return [*self._methods(sizes), *self._evaluation(sizes)]

    @property
    def automatic(self) -> bool:
        """Whether the batch size may be chosen."""
        return all(examples.automatic for examples in self._given)

    @property
    def most_examples(self) -> int:
        return max(map(len, self._given), default=0)

    @property
    def waiting_bytes(self) -> int:
        """Activations that wait for the next block, at most: those of the experts and of the student."""
        return 0 if self.walk is None else 2 * self.walk.examples * self.walk.widest_output

    @property
    def usual_activation_bytes(self) -> int:
        return self._sizes.activation_memory

    @property
    def usual_threads(self) -> int:
        return self._sizes.threads

    @property
    def usual_row_block(self) -> int:
        return self._sizes.row_block

    @property
    def _given(self) -> list[Examples]:
        return [task.calibration for task in self._tasks.values() if task.calibration is not None]

    @cached_property
    def _sizes(self) -> Sizes:
        return sizes_of(self._opened.models, self.delivered_bytes, self.walk)

    @cached_property
    def walk(self) -> Walk | None:
        """None where no method walks the model."""
        backbone = self._opened.models.backbone
        needing = any("data" in method.needs for _, _, method in self._asked())
        walk = walk_of(backbone, self._tasks) if needing and backbone is not None else None
        return None if walk is None else replace(walk, itemsize=_ITEMSIZES[self._spec.precision])

    def _limited(self, limits: Limits, batch: int | None) -> Sizes:
        sizes = self._sizes
        if sizes.walk is not None and batch is not None:
            sizes = replace(sizes, walk=replace(sizes.walk, batch=batch))
        return replace(
            sizes,
            threads=limits.threads or sizes.threads,
            row_block=limits.row_block or sizes.row_block,
            activation_memory=sizes.activation_memory
            if limits.activation_memory is None
            else limits.activation_memory,
        )

    def _asked(self) -> Iterator[tuple[str, Component, Any]]:
        merge = self._spec.merge
        yield "merge", merge, strategies.get(merge.type)
        for one in self._spec.calibrate:
            yield "calibrate", one, calibrators.get(one.type)

    def _methods(self, sizes: Sizes) -> Iterator[Step]:
        for name, asked, method in self._asked():
            made = method(asked.settings)
            each = [type(made)(settings).cost(sizes) for settings in asked.all_settings()]
            most = max(each, key=lambda cost: cost.memory)
            yield Step(name, replace(most, work=each[0].work), asked, made)

    def _evaluation(self, sizes: Sizes) -> Iterator[Step]:
        """To score: one model whole, in float32. For the drift: one block after the other, the experts' once,
        then the results'."""
        seen = [task for task in self._tasks.values() if task.test or task.calibration or task.validation]
        scored = [task for task in self._tasks.values() if is_scored(task)]
        if self._opened.models.backbone is None or not (seen or scored):
            return
        results = 1 + bool(self._spec.calibrate)
        tested = sum(len(task.test) for task in scored if task.test is not None)
        forward, walked, waiting = 0.0, 0, 0.0
        if sizes.walk is not None:
            forward, walked = _forward(sizes.walk), _walked(sizes.walk)
            held = 2 * EXAMPLES * sum(one.output for one in sizes.walk.blocks)  # what enters and leaves
            waiting = min(sizes.activation_memory, held)
        forwards = tested * (results + 2) + EXAMPLES * len(seen) * (results + 1)
        read = sizes.expert_bytes + results * max(1, len(seen)) * sizes.base_bytes
        memory = 4.0 * (sizes.parameters if scored else walked) + waiting + WORKSPACE
        yield Step("evaluate", Cost(memory=memory, work=Work(single=forward * forwards, read=read)))


_ITEMSIZES = {"float32": 4, "mixed": 2, "float64": 8}


def _walked(walk: Walk) -> int:
    """Parameters that are held while blocks are run one by one."""
    return walk.outside + max(block.elements for block in walk.blocks)


def _forward(walk: Walk) -> float:
    """Operations of the whole model on one example."""
    return walk.stem + sum(block.operations for block in walk.blocks)
