"""check: everything that can be known before the work, in one answer, the gravest first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from merging.checkpoints.number_kinds import refuse_complex
from merging.checkpoints.run_folder import RunFolder
from merging.components import calibrators, strategies
from merging.contracts.layer_rule import LayerRule
from merging.contracts.method import Progress, silent
from merging.errors import MergingError, OutputError, Problem, TracingError
from merging.preflight import Finding, refusal, weight_findings
from merging.report.stages import resident
from merging.room import disk_findings, memory_findings
from merging.sameness import same_findings
from merging.spec.own_folders import clashes
from merging.sufficiency import overlap_findings, token_findings

if TYPE_CHECKING:
    from merging.pipeline import Pipeline
    from merging.spec import PipelineSpec

Made = TypeVar("Made")

REPORTED = ("few_examples", "overlap")  # warnings that a report has of its own, by what came of it


def check(
    pipeline: Pipeline,
    *,
    device: str,
    out: Path | None,
    read_weights: bool = True,
    progress: Progress = silent,
) -> tuple[Finding, ...]:
    """Warnings and what `allow` lets through, for the report; the spec's notes are not among them.

    Everything is tried, so that what is wrong with device, models, examples and machine comes together.
    `read_weights`: all of them, for NaN and infinity; else their first rows, and what is remembered of them.
    Raises MergingError: the one that was met or, of several, one that has them all, and the warnings after
    them."""
    from merging.devices import choose_device
    from merging.finite_inputs import refuse_not_finite

    errors: list[MergingError] = []
    allow = pipeline.spec.allow

    def tried(action: Callable[[], Made]) -> Made | None:
        try:
            return action()
        except MergingError as error:
            errors.append(error)
            return None

    tried(lambda: choose_device(device))
    usable = out is not None and tried(lambda: _usable(pipeline.spec, out)) is True
    findings: list[Finding] = []
    opened = tried(pipeline.resolve)
    if opened is not None:
        tried(lambda: refuse_not_finite(pipeline.spec, opened, read=read_weights, progress=progress))
        tried(lambda: refuse_complex(opened.models))
        findings += opened.findings
        if not _stopping(findings, allow):  # what differs by its config need not be compared by its weights
            findings += weight_findings(opened.models)
            findings += same_findings(opened.models, whole=read_weights)
        tasks = tried(pipeline.tasks)
        if tasks is not None:
            findings += overlap_findings(tasks)
            if tried(pipeline.choice) is not None:
                findings += _findings_of_steps(pipeline)
        if out is not None and usable:
            findings += _disk(pipeline, out)
    if (error := _answer(errors, findings, allow)) is not None:
        raise error from (errors[0] if errors else None)
    return tuple(finding for finding in _by_gravity(findings) if finding.stops or finding.name not in allow)


def told(findings: Sequence[Finding], allow: Sequence[str]) -> tuple[str, ...]:
    """Findings that did not stop, a line each."""
    return tuple(
        f"{'allowed: ' if one.name in allow else ''}{one.problem.where}: {one.problem.what} [{one.name}]. "
        f"{one.problem.remedy}"
        for one in findings
    )


def _answer(
    errors: Sequence[MergingError], findings: Sequence[Finding], allow: Sequence[str]
) -> MergingError | None:
    stopping = _stopping(findings, allow)
    warnings = [
        finding.problem.named(finding.name, warning=True)
        for finding in findings
        if not finding.stops and finding.name not in allow
    ]
    if stopping:
        errors = [*errors, refusal(stopping)]
    if not errors:
        return None
    if len(errors) == 1:
        only = errors[0]
        return type(only)(only.message, remedy=only.remedy, problems=[*only.problems, *warnings])
    problems = [
        problem for error in errors for problem in (Problem("", error.message, error.remedy), *error.problems)
    ]
    return type(errors[0])(f"{len(errors)} kinds of things stop this run", problems=[*problems, *warnings])


def _stopping(findings: Sequence[Finding], allow: Sequence[str]) -> list[Finding]:
    return [finding for finding in findings if finding.stops and finding.name not in allow]


def _by_gravity(findings: Sequence[Finding]) -> list[Finding]:
    return sorted(findings, key=lambda finding: not finding.stops)


def _findings_of_steps(pipeline: Pipeline) -> list[Finding]:
    """What the laws of memory, and the sizes that they look at, warn of."""
    steps, choice = pipeline.steps(), pipeline.choice()
    try:
        worst = max(steps.costs(choice), key=lambda step: step.cost.memory)
    except TracingError:  # a model that cannot be walked without weights; the run tells more of any other
        return []
    found = memory_findings(resident() + worst.cost.memory, worst.title)
    spec = pipeline.spec
    methods = [strategies.get(spec.merge.type), *(calibrators.get(one.type) for one in spec.calibrate)]
    if steps.walk is not None and any(issubclass(method, LayerRule) for method in methods):
        found += token_findings(steps.walk)
    return found


def _usable(spec: PipelineSpec, out: Path) -> bool:
    RunFolder(out).check()
    if found := clashes(out, spec.base, spec.experts, spec.merge, spec.tasks):
        problems = [Problem("", f"it {what}") for what in found]
        raise OutputError(
            f"{out} cannot be the output folder", problems=problems, remedy="Choose another folder."
        )
    return True


def _disk(pipeline: Pipeline, out: Path) -> list[Finding]:
    stages = ("merged", "calibrated") if pipeline.spec.calibrate else ("merged",)
    return disk_findings(out, checkpoint_bytes=pipeline.steps().delivered_bytes, stages=stages)
