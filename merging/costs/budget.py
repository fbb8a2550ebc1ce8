"""The memory budget: batch size, row blocks, threads and what waits on disk are chosen so that a run keeps
to it; where that cannot be, the run is refused before any work."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from merging.errors import Problem, SpecError
from merging.limits import USUAL, Limits

if TYPE_CHECKING:
    from merging.costs.steps import Step, Steps
    from merging.data.task import Task

_MARGIN = 1.15  # room over what the laws say
_BATCHES = (256, 128, 64, 32, 16, 8, 4, 2, 1)
_FEW = 8  # examples: smaller batches cost more than activations on disk
_SMALLEST_BLOCK = 1 << 12


@dataclass(frozen=True)
class Choice:
    """What a run does to keep to its memory; nothing of it, where the spec does not limit that."""

    limits: Limits = USUAL
    batch: int | None = None  # examples in a batch, where the data source says nothing

    def told(self) -> dict[str, int]:
        """For people: what differs from a run without a limit."""
        chosen = {
            "batch": self.batch,
            "row block": self.limits.row_block,
            "threads": self.limits.threads,
            "activation_bytes": self.limits.activation_memory,
        }
        return {name: value for name, value in chosen.items() if value is not None}


USUAL_CHOICE = Choice()


def choose(steps: Steps, memory: int | None, start: int) -> Choice:
    """`start`: bytes that the process holds before it begins. Raises SpecError if `memory` is too little."""
    if memory is None:
        return USUAL_CHOICE
    room = (memory - start) / _MARGIN

    def fits(choice: Choice, concerned: Callable[[Step], bool]) -> bool:
        return all(step.cost.memory <= room for step in steps.costs(choice) if concerned(step))

    choice = USUAL_CHOICE
    for options, concerned in ((_walking(steps), _walks), (_blocks(steps), _is_blocked)):
        for option in options:
            choice = option(choice)
            if fits(choice, concerned):
                break
    problems = [
        Problem(step.title, f"needs {_readable(start + step.cost.memory * _MARGIN)}")
        for step in steps.costs(choice)
        if step.cost.memory > room
    ]
    if problems:
        raise SpecError(
            f'"memory" is {_readable(memory)}, to which this run cannot keep; Python and its libraries '
            f"hold {_readable(start)}",
            problems=problems,
            remedy="Raise it, if the machine has more; `merging pipeline plan` shows each step's law.",
        )
    return choice


Option = Callable[[Choice], Choice]


def _walking(steps: Steps) -> Iterator[Option]:
    """What a method that runs models may do, the best first."""
    waiting, usual = steps.waiting_bytes, steps.usual_activation_bytes
    sizes = [size for size in _BATCHES if size < 2 * steps.most_examples] if steps.automatic else [None]
    for activations, least in ((max(waiting, usual), _FEW), (usual, _FEW), (0, 1)):
        for size in sizes:
            if size is None or size >= least or size == sizes[0]:
                yield _option(activations, size)


def _option(activations: int, size: int | None) -> Option:
    return lambda choice: replace(
        choice, batch=size, limits=replace(choice.limits, activation_memory=activations)
    )


def _blocks(steps: Steps) -> Iterator[Option]:
    """What a rule may do that goes through row blocks: smaller ones, in fewer threads."""
    threads, block = steps.usual_threads, steps.usual_row_block
    yield lambda choice: choice
    while threads > 1 or block > _SMALLEST_BLOCK:
        threads, block = max(1, threads // 2), max(_SMALLEST_BLOCK, block // 2)
        yield _block_option(block, threads)


def _block_option(block: int, threads: int) -> Option:
    return lambda choice: replace(choice, limits=replace(choice.limits, row_block=block, threads=threads))


def _walks(step: Step) -> bool:
    return step.method is not None and "data" in step.method.needs


def _is_blocked(step: Step) -> bool:
    return step.method is not None and not _walks(step)


def rebatch_(tasks: Mapping[str, Task], size: int) -> None:
    """Set the batch size of calibration examples whose source says nothing about it."""
    for task in tasks.values():
        if task.calibration is not None and task.calibration.automatic:
            task.calibration.batch_size = size


def _readable(size: float) -> str:
    return f"{size / (1 << 30):.2f} GiB"
