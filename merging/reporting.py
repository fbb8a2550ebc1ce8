"""make_report: everything that a run learned, from its manifests and measurements."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from merging.checkpoints.lora_sink import loss_note
from merging.checkpoints.manifest import read_manifest
from merging.components import calibrators
from merging.data.task import Task
from merging.opened import Opened
from merging.provenance import versions
from merging.report.curve import Curve
from merging.report.report import Report, StageReport
from merging.report.solver import ParameterFate, SolverRow
from merging.scoring import Measured
from merging.spec import PipelineSpec


def make_report(
    spec: PipelineSpec,
    opened: Opened,
    tasks: Mapping[str, Task],
    results: Mapping[str, Path],
    measured: Measured,
    *,
    curve: Curve | None,
    stages: Sequence[StageReport],
    device: str,
    remarks: Sequence[str],
) -> Report:
    """`results`: "merged" and maybe "calibrated", finished checkpoints; the last one is the run's result."""
    final = list(results.values())[-1]
    made = {name: read_manifest(path) or {} for name, path in results.items()}
    adapters = {name: about.get("notes", {}).get("adapter") for name, about in made.items()}
    losses = [loss_note(name, found) for name, found in adapters.items() if found is not None]
    notes = [note for task in tasks.values() for note in task_notes(task)]
    used = spec.calibrate if "calibrated" in results else ()
    return Report.of(
        tasks=measured.task_reports(tasks),
        warnings=[*opened.notes, *remarks, *notes, *losses, *measured.notes],
        spec=spec.model_dump(mode="json"),
        versions=versions(),
        seed=spec.seed,
        device=device,
        base=spec.base.model,
        experts={task: ref.ref.model for task, ref in spec.experts.items()},
        strategy=spec.merge.type,
        calibrators=tuple(one.type for one in used),
        drift=measured.drift_report(),
        solver=tuple(row for about in made.values() for row in _solver_rows(about)),
        parameters={
            name: ParameterFate(**fate) for name, fate in made[final.name].get("parameters", {}).items()
        },
        coefficients=made["merged"].get("notes", {}).get("coefficients", {}),
        curve=curve,
        stages=tuple(stages),
        checkpoint=str(final),
        changes_inference=any(calibrators.get(one.type).changes_inference for one in used),
    )


def task_notes(task: Task) -> tuple[str, ...]:
    """What the report should warn of in a task's examples."""
    splits = (task.calibration, task.validation, task.test)
    return tuple(note for examples in splits if examples is not None for note in examples.notes)


def _solver_rows(about: Mapping[str, Any]) -> list[SolverRow]:
    health = about.get("notes", {}).get("health", {})
    stage = str(about.get("stage", ""))
    return [
        SolverRow(module=name, block=f"{stage}: {name.rpartition('.')[0]}", **row)
        for name, row in health.items()
    ]
