"""Pipeline: resolve, merge, calibrate, evaluate, report - a straight line, each step done once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from merging.contracts.method import Progress, silent
from merging.errors import OutputError
from merging.spec import PipelineSpec, load_spec, parse_spec

if TYPE_CHECKING:
    from merging.costs.budget import Choice
    from merging.data.task import Task
    from merging.opening import Opened
    from merging.plan import Plan
    from merging.report.curve import Criterion, Curve
    from merging.report.report import Report

Until = Literal["merge", "calibrate"]


class Pipeline:
    """One spec, checked. `run` leaves merged/, calibrated/, heads/ and report.json; what is done is not done
    again."""

    def __init__(self, spec: PipelineSpec) -> None:
        self.spec = spec
        self.curve: Curve | None = None  # of the search that made this pipeline
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
            from merging.task_opening import open_tasks

            self._tasks = open_tasks(self.spec, self.resolve())
        return self._tasks

    def validate(self) -> list[str]:
        """Everything that can be known before a weight is read; returns remarks, raises what stops a run."""
        from merging.reporting import task_notes
        from merging.running import choose_device

        choose_device(self.spec.device)
        opened = self.resolve()
        notes = [note for task in self.tasks().values() for note in task_notes(task)]
        self.choice()
        return [*opened.notes, *notes]

    def choice(self) -> Choice:
        """What a run will do to keep to the spec's memory. Raises SpecError if it cannot."""
        from merging.costs.budget import USUAL_CHOICE, choose
        from merging.costs.steps import Steps
        from merging.report.stages import resident

        if self.spec.memory is None:
            return USUAL_CHOICE
        opened, tasks = self.resolve(), self.tasks()
        start = resident()
        return choose(Steps(self.spec, opened, tasks), self.spec.memory, start)

    def plan(self) -> Plan:
        """What a run will do and need. No weights are read."""
        from merging.plan import make_plan

        return make_plan(self)

    def search(
        self,
        sweeps: Mapping[str, Sequence[Any]] | Sequence[str],
        *,
        criterion: Criterion | None = None,
        until: Until | None = None,
        device: str | None = None,
        progress: Progress = silent,
    ) -> Pipeline:
        """The pipeline with the best of all points in its spec, judged without test examples; see `curve`.

        >>> report = pipeline.search({"merge.scale": [0.2, 0.3, 0.4]}).run("out")
        """
        from merging.search import search

        spec, curve = search(
            self.spec,
            self.resolve(),
            self.tasks(),
            sweeps,
            criterion=criterion,
            merge_only=until == "merge",
            device=device or self.spec.device,
            progress=progress,
        )
        found = Pipeline(spec)
        weights = {task: ref.weight for task, ref in spec.experts.items()}
        opened = self.resolve()
        found._opened = replace(opened, models=opened.models.weighed(weights))
        found._tasks, found.curve = self._tasks, curve
        return found

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

        Raises MergingError; nothing appears under its final name before it is whole. Started by torchrun, all
        its processes share the work, and all return the report.
        """
        from merging.checkpoints.run_folder import RunFolder
        from merging.costs.budget import rebatch_
        from merging.provenance import fingerprint
        from merging.ranks import ranks
        from merging.running import Run, choose_device
        from merging.together import Follower

        target = Path(out) if out is not None else self.spec.output.path
        if target is None:
            raise OutputError("no output folder is given", remedy='Set "output": {"path": ...} or --out.')
        together = ranks()
        choice = together.tell(self.choice() if together.first else None)
        if choice.batch is not None:
            rebatch_(self.tasks(), choice.batch)
        if not together.first:
            where = choose_device(device or self.spec.device)
            follower = Follower(
                self.spec, self.resolve(), self.tasks(), device=where, ranks=together, limits=choice.limits
            )
            return follower.serve()
        folder = RunFolder(target.absolute())
        folder.check()
        choose_device(device or self.spec.device)
        opened, tasks = self.resolve(), self.tasks()
        asked = self.spec.canonical()
        folder.open(fingerprint(asked), asked, overwrite=overwrite)
        with folder:
            run = Run(
                self.spec,
                opened,
                tasks,
                folder,
                device=device or self.spec.device,
                progress=progress,
                curve=self.curve,
                ranks=together,
                limits=choice.limits,
            )
            report = run.all(until)
            run.leader.end(report)
            return report
