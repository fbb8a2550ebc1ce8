"""held_out: the examples that drift is measured on. Whatever was fitted on a task's calibration examples is
judged on others, as far as there are any; no labels are read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from merging.data.opening import open_spare
from merging.data.portion import Portion
from merging.data.spec import DataSpec
from merging.data.task import Examples, Task
from merging.errors import DataError
from merging.spec import PipelineSpec

Origin = Literal["spare", "validation", "test", "fitted"]

WORDS: Mapping[Origin, str] = {
    "spare": "calibration examples that were not drawn",
    "validation": "validation examples",
    "test": "test examples, without their labels",
    "fitted": "calibration examples that were fitted, too (there are no others)",
}


@dataclass(frozen=True)
class HeldOut:
    """Examples of one task, and where they come from."""

    examples: Examples
    origin: Origin
    note: str = ""  # why spare examples were passed over, where something is wrong with them


def held_out(
    task: Task, source: DataSpec | None, *, base_folder: Path, seed: int, count: int
) -> HeldOut | None:
    """Up to `count` examples that the calibration does not draw from its `source`; where it draws all that
    there are, validation, then test, and last the calibration examples. None for a task without any."""
    spare, note = None, ""
    if source is not None and task.calibration is not None:
        try:
            spare = open_spare(source, task=task.name, base_folder=base_folder, seed=seed, count=count)
        except DataError as error:
            note = f"{error.message}: drift is measured on other examples"
        if spare is not None:
            spare.batch_size = task.calibration.batch_size
            spare = _unlike(spare, task.calibration)
    found: dict[Origin, Examples | None] = {
        "spare": spare,
        "validation": task.validation,
        "test": task.test,
        "fitted": task.calibration,
    }
    for origin, examples in found.items():
        if examples is not None and len(examples):
            return HeldOut(examples, origin, note)
    return None


def held_out_of(
    spec: PipelineSpec, tasks: Mapping[str, Task], *, base_folder: Path, count: int
) -> dict[str, HeldOut]:
    """Task -> what its drift is measured on, for those that have examples at all."""
    found = {
        name: held_out(
            task,
            spec.tasks[name].calibration if name in spec.tasks else None,
            base_folder=base_folder,
            seed=spec.seed,
            count=count,
        )
        for name, task in tasks.items()
    }
    return {name: one for name, one in found.items() if one is not None}


def _unlike(spare: Examples, calibration: Examples) -> Examples:
    """Without those whose inputs are among the calibration examples, too."""
    fitted, hashes = frozenset(calibration.hashes()), spare.hashes()
    if fitted.isdisjoint(hashes):
        return spare
    return Portion(spare, lambda number: hashes[number] not in fitted, "not fitted")
