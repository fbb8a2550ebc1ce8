"""Pipeline: resolve, merge, calibrate, evaluate, report - a straight line, each step done once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from merging.arguments import (
    DEVICE,
    FLAG,
    PLACE,
    PROGRESS,
    TEXTS,
    checked,
    is_place,
    kind,
    one_of,
    optional,
    whole,
)
from merging.contracts.method import Progress, silent
from merging.errors import OutputError, SpecError, run_begun
from merging.file_names import refuse_unnameable, telling_of_names
from merging.interpreter import refuse_without_docstrings
from merging.open_files import telling_of_open_files
from merging.spec import PipelineSpec, load_spec, parse_spec
from merging.working_folder import working_folder

if TYPE_CHECKING:
    from merging.costs.budget import Choice
    from merging.costs.steps import Steps
    from merging.data.task import Task
    from merging.opened import Input, Opened
    from merging.plan import Plan
    from merging.report.curve import Criterion, Curve
    from merging.report.drift import DriftReport
    from merging.report.report import Report

Until = Literal["merge", "calibrate"]

_SPEC = kind(
    "a PipelineSpec",
    lambda value: isinstance(value, PipelineSpec),
    "Pipeline.from_spec takes files and dicts.",
)
_SOURCE = kind(
    "the path of a spec, a dict or a PipelineSpec",
    lambda value: isinstance(value, PipelineSpec | Mapping) or is_place(value),
)
_SWEEPS = kind(
    "values by path, or a list of texts",
    lambda value: isinstance(value, str | Mapping | Sequence) and not isinstance(value, bytes | bytearray),
    'Like {"merge.scale": [0.2, 0.3]} or ["merge.scale=0.1:1.0:0.1"].',
)
_UNTIL = optional(one_of("merge", "calibrate"))
_CRITERION = optional(one_of("features", "entropy", "validation"))
_OUT, _DEVICE = optional(PLACE), optional(DEVICE)


class Pipeline:
    """One spec, checked. `run` leaves merged/, calibrated/, heads/ and report.json; what is done is not done
    again."""

    @checked(spec=_SPEC)
    def __init__(self, spec: PipelineSpec) -> None:
        refuse_without_docstrings()
        self.spec = spec
        self.curve: Curve | None = None  # of the search that made this pipeline
        self._opened: Opened | None = None
        self._tasks: dict[str, Task] | None = None
        self._choice: Choice | None = None
        self._steps: Steps | None = None

    @classmethod
    @checked(spec=_SOURCE, sets=TEXTS)
    def from_spec(
        cls, spec: PipelineSpec | Mapping[str, Any] | str | Path, *, sets: Sequence[str] = ()
    ) -> Pipeline:
        """From a file, a dict (paths relative to the working folder) or a PipelineSpec.

        Raises SpecError with every problem of the spec.
        """
        if isinstance(spec, PipelineSpec):
            if sets:
                raise SpecError(
                    "sets are put into a spec before it is checked, and this PipelineSpec is checked already",
                    remedy="Give the file or the dict that it was made from.",
                )
            return cls(spec)
        if isinstance(spec, Mapping):
            return cls(parse_spec(dict(spec), working_folder(), "merge", sets))
        return cls(load_spec(spec, sets))

    @checked()
    def resolve(self) -> Opened:
        """Open all models (headers only) and compare them; all problems are raised together."""
        if self._opened is None:
            from merging.opening import open_models

            self._opened = open_models(self.spec)
        return self._opened

    @checked()
    def tasks(self) -> dict[str, Task]:
        """Examples and heads of every task."""
        if self._tasks is None:
            from merging.task_opening import open_tasks

            self._tasks = open_tasks(self.spec, self.resolve())
        return self._tasks

    @checked(read_weights=FLAG, progress=PROGRESS)
    def validate(self, *, read_weights: bool = False, progress: Progress = silent) -> list[str]:
        """Everything that can be known before the work: remarks, the gravest first; raises what stops a run.

        Of weights only the first rows of each matrix are read; with `read_weights` all, as a run does, in
        which NaN and infinity are found."""
        from merging.checking import check, told
        from merging.reporting import task_notes

        found = check(
            self,
            device=self.spec.device,
            out=self.spec.output.path,
            read_weights=read_weights,
            progress=progress,
        )
        notes = [note for task in self.tasks().values() for note in task_notes(task)]
        return [*told(found, self.spec.allow), *self.resolve().notes, *notes]

    @checked()
    def choice(self) -> Choice:
        """What a run will do to keep to the spec's memory. Raises SpecError if it cannot."""
        from merging.costs.budget import USUAL_CHOICE, choose
        from merging.report.stages import resident

        if self.spec.memory is None:
            return USUAL_CHOICE
        if self._choice is None:
            steps = self.steps()
            self._choice = choose(steps, self.spec.memory, resident())
        return self._choice

    def _reads(self) -> dict[str, Input]:
        """By role, all files that are known to be read."""
        from merging.reading_list import deciding_inputs, measuring_inputs

        if self._opened is None:
            return {}
        tasks = self._tasks or {}
        return {
            **self._opened.inputs,
            **deciding_inputs(self.spec, tasks),
            **measuring_inputs(self.spec, tasks),
        }

    @checked()
    def steps(self) -> Steps:
        """What a run will cost, step by step."""
        from merging.costs.steps import Steps

        if self._steps is None:
            self._steps = Steps(self.spec, self.resolve(), self.tasks())
        return self._steps

    @checked(read_weights=FLAG, progress=PROGRESS)
    def plan(self, *, read_weights: bool = False, progress: Progress = silent) -> Plan:
        """What a run will do and need. Of weights only the first rows of each matrix are read, unless
        `read_weights` is given, as for `validate`."""
        from merging.plan import make_plan

        return make_plan(self, read_weights=read_weights, progress=progress)

    @checked(sweeps=_SWEEPS, criterion=_CRITERION, until=_UNTIL, device=_DEVICE, progress=PROGRESS)
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
        from merging.checking import check
        from merging.search import search
        from merging.want_of_files import want_of_files

        with want_of_files(self._reads):
            check(self, device=device or self.spec.device, out=None, progress=progress)
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

    @checked(out=_OUT, until=_UNTIL, device=_DEVICE, overwrite=FLAG, progress=PROGRESS)
    @telling_of_names()
    @telling_of_open_files()
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
        from merging.checking import REPORTED, check, told
        from merging.checkpoints.run_folder import RunFolder
        from merging.costs.budget import rebatch_
        from merging.devices import choose_device
        from merging.provenance import fingerprint
        from merging.ranks import ranks
        from merging.running import Run
        from merging.together import Follower
        from merging.want_of_files import want_of_files
        from merging.want_of_memory import want_of_memory
        from merging.want_of_room import want_of_room

        target = Path(out) if out is not None else self.spec.output.path
        if target is None:
            raise OutputError("no output folder is given", remedy='Set "output": {"path": ...} or --out.')
        target = target if target.is_absolute() else working_folder() / target
        refuse_unnameable(target)
        folder, together = RunFolder(target), ranks()
        remarks: tuple[str, ...] = ()
        if together.first:
            folder.check()
            with want_of_files(self._reads):
                found = check(self, device=device or self.spec.device, out=target, progress=progress)
            remarks = told([one for one in found if one.name not in REPORTED], self.spec.allow)
        choice = together.tell(self.choice() if together.first else None)
        if choice.batch is not None:
            rebatch_(self.tasks(), choice.batch)
        if not together.first:
            with want_of_files(self._reads, target), run_begun():
                where, tasks = choose_device(device or self.spec.device), self.tasks()
                follower = Follower(
                    self.spec, self.resolve(), tasks, device=where, ranks=together, limits=choice.limits
                )
                with want_of_memory(tasks):
                    return follower.serve()
        opened, tasks = self.resolve(), self.tasks()
        asked = self.spec.canonical()
        with want_of_room(target):
            folder.open(fingerprint(asked), asked, overwrite=overwrite)
        with want_of_room(target), folder, want_of_memory(tasks), want_of_files(self._reads, target):
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
                remarks=remarks,
            )
            report = run.all(until)
            run.leader.end(report)
            return report

    @checked(
        out=_OUT,
        examples=optional(whole(at_least=1)),
        frechet=FLAG,
        device=_DEVICE,
        overwrite=FLAG,
        progress=PROGRESS,
    )
    def drift(
        self,
        out: Path | str | None = None,
        *,
        examples: int | None = None,
        frechet: bool = True,
        device: str | None = None,
        overwrite: bool = False,
        progress: Progress = silent,
    ) -> DriftReport:
        """Do what is missing of the run, then measure drift in full, on up to `examples` of each task (16 if
        not given). The run's report.json is brought up to date.

        Raises MergingError; DataError where there is nothing to measure on.
        """
        from merging.checkpoints.run_folder import RunFolder
        from merging.devices import choose_device
        from merging.drifting import drift_of_run, refuse_nothing
        from merging.evaluation.drift import EXAMPLES
        from merging.provenance import fingerprint
        from merging.ranks import ranks
        from merging.want_of_files import want_of_files

        refuse_nothing(self.resolve(), self.tasks())
        report = self.run(out, device=device, overwrite=overwrite, progress=progress)
        if not ranks().first:
            return report.drift
        asked, place = self.spec.canonical(), Path(report.checkpoint).parent
        folder = RunFolder(place)
        notes = folder.open(fingerprint(asked), asked)
        with folder, want_of_files(self._reads, place), run_begun():
            return drift_of_run(
                self.spec,
                self.resolve(),
                self.tasks(),
                folder,
                examples=examples or EXAMPLES,
                frechet=frechet,
                device=choose_device(device or self.spec.device),
                remarks=(*report.warnings, *notes),
                progress=progress,
            )
