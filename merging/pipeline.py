"""Pipeline: resolve, merge, calibrate, evaluate, report - a straight line, each step done once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from merging.contracts.method import Progress, silent
from merging.errors import OutputError
from merging.spec import PipelineSpec, load_spec, parse_spec

if TYPE_CHECKING:
    from merging.data.task import Task
    from merging.opening import Opened
    from merging.plan import Plan
    from merging.report.report import Report

Until = Literal["merge", "calibrate"]


class Pipeline:
    """One spec, checked. `run` leaves merged/, calibrated/, heads/ and report.json; what is done is not done
    again."""

    def __init__(self, spec: PipelineSpec) -> None:
        self.spec = spec
        self._opened: Opened | None = None
        self._tasks: dict[str, Task] | None = None

    @classmethod
    def from_spec(
        cls, spec: PipelineSpec | Mapping[str, Any] | str | Path, *, sets: Sequence[str] = ()
    ) -> Pipeline:
        """From a file, a dict (paths relative to the working folder) or a PipelineSpec.

        Raises SpecError with every problem of the spec.
        """
        if isinstance(spec, PipelineSpec):
            return cls(spec)
        if isinstance(spec, Mapping):
            return cls(parse_spec(dict(spec), Path.cwd(), "merge", sets))
        return cls(load_spec(spec, sets))

    def resolve(self) -> Opened:
        """Open all models (headers only) and compare them; all problems are raised together."""
        if self._opened is None:
            from merging.opening import open_models

            self._opened = open_models(self.spec)
        return self._opened

    def tasks(self) -> dict[str, Task]:
        """Examples and heads of every task."""
        if self._tasks is None:
            from merging.opening import open_tasks

            self._tasks = open_tasks(self.spec, self.resolve())
        return self._tasks

    def validate(self) -> list[str]:
        """Everything that can be known before a weight is read; returns remarks, raises what stops a run."""
        opened = self.resolve()
        notes = [note for task in self.tasks().values() for note in _task_notes(task)]
        return [*opened.notes, *notes]

    def plan(self) -> Plan:
        """What a run will do and need. No weights are read."""
        from merging.plan import make_plan

        return make_plan(self)

    def run(
        self,
        out: Path | str | None = None,
        *,
        until: Until | None = None,
        device: str | None = None,
        overwrite: bool = False,
        progress: Progress = silent,
    ) -> Report:
        """Do what is missing in the output folder and return the report, which is also left there.

        Raises MergingError; nothing appears under its final name before it is whole.
        """
        from merging.checkpoints.run_folder import RunFolder
        from merging.provenance import fingerprint
        from merging.running import Run

        target = Path(out) if out is not None else self.spec.output.path
        if target is None:
            raise OutputError("no output folder is given", remedy='Set "output": {"path": ...} or --out.')
        folder = RunFolder(target.absolute())
        folder.check()
        opened, tasks = self.resolve(), self.tasks()
        asked = self.spec.canonical()
        folder.open(fingerprint(asked), asked, overwrite=overwrite)
        with folder:
            run = Run(self.spec, opened, tasks, folder, device=device or self.spec.device, progress=progress)
            return run.all(until)


def _task_notes(task: Task) -> tuple[str, ...]:
    return tuple(
        note for examples in (task.calibration, task.test) if examples is not None for note in examples.notes
    )
