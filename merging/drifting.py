"""drift_of_run: drift in full of the results that a run left, put into its report and its model card."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from merging.checkpoints.amending import amend_, relist_
from merging.checkpoints.kept_manifests import keep_manifest
from merging.checkpoints.manifest import MANIFEST
from merging.checkpoints.run_folder import RunFolder
from merging.contracts.calibrator import adapting
from merging.contracts.method import Progress, silent
from merging.data.task import Task
from merging.errors import DataError
from merging.evaluation.metric import Adapt
from merging.held_out import held_out_of
from merging.making import make_calibrators, open_result
from merging.opened import Opened
from merging.report.card import with_harm
from merging.report.drift import DriftReport
from merging.report.harm import harm_finding
from merging.report.report import Report
from merging.scoring import measure_drift
from merging.spec import PipelineSpec


def drift_of_run(
    spec: PipelineSpec,
    opened: Opened,
    tasks: Mapping[str, Task],
    folder: RunFolder,
    *,
    examples: int,
    frechet: bool,
    device: str,
    remarks: Sequence[str] = (),
    progress: Progress = silent,
) -> DriftReport:
    """`folder`: open, and with a finished run of this spec in it. `remarks`: warnings that its report shall
    have, too."""
    held = held_out_of(spec, tasks, base_folder=opened.side_files, count=examples)
    results = {
        name: folder.path / name
        for name in ("merged", "calibrated")
        if (folder.path / name).is_dir() and (name == "merged" or spec.calibrate)
    }
    measured = measure_drift(
        opened.models,
        {name: open_result(path, opened) for name, path in results.items()},
        held,
        adapt=_adapt(spec, folder, device) if "calibrated" in results else None,
        examples=examples,
        frechet=frechet,
        device=device,
        work=folder.work,
        progress=progress,
    )
    found = measured.drift_report()
    _put_into_report(folder, found, remarks)
    if "calibrated" in results:
        tell_harm_(results["calibrated"], found, scratch=folder.state)
    for name in results:  # also where an earlier call was killed before it came to this
        keep_manifest(folder.state, folder.path / name)
        relist_(folder.path, f"{name}/{MANIFEST}", scratch=folder.state, manifest=folder.state)
    return found


def tell_harm_(checkpoint: Path, drift: DriftReport, *, scratch: Path) -> None:
    """Let the model card of a calibrated checkpoint say what calibrating harmed, if anything.

    `scratch`: as in `amend_`."""
    card = checkpoint / "README.md"
    if card.is_file():
        told = with_harm(card.read_text(encoding="utf-8"), harm_finding(drift))
        amend_(checkpoint, card.name, told, scratch=scratch)


def _put_into_report(folder: RunFolder, drift: DriftReport, remarks: Sequence[str]) -> None:
    report = Report.read(folder.path / "report.json")
    before, now = harm_finding(report.drift), harm_finding(drift)
    warnings = [one for one in dict.fromkeys((*report.warnings, *remarks)) if one != before]
    if now is not None and now not in warnings:
        warnings.append(now)
    changed = report.model_copy(update={"drift": drift, "warnings": tuple(warnings)})
    text = changed.model_dump_json(indent=2) + "\n"
    amend_(folder.path, "report.json", text, scratch=folder.state, manifest=folder.state)


def _adapt(spec: PipelineSpec, folder: RunFolder, device: str) -> Adapt:
    used = make_calibrators(spec, device, folder.work)
    for calibrator in used:
        calibrator.load_plugins(folder.path / "heads")
    return adapting(used)


def refuse_nothing(opened: Opened, tasks: Mapping[str, Task]) -> None:
    """Raise DataError where there is nothing to measure on, or models cannot be run."""
    if opened.models.backbone is None:
        raise DataError(
            "drift needs models that can be run, and the architecture of these is not known",
            remedy='Put the base\'s config.json beside its weights, or name the "backbone".',
        )
    given = [name for name, task in tasks.items() if task.calibration or task.validation or task.test]
    if not any(task in given for task in opened.models.experts):
        raise DataError(
            "drift is measured on examples of each expert's task, and no task has any "
            f"(experts: {', '.join(opened.models.experts) or 'none'}; tasks with examples: "
            f"{', '.join(given) or 'none'})",
            remedy='Give tasks a "calibration" source; no labels are needed.',
        )
