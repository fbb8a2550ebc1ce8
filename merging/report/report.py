"""Report: everything a run learned, as JSON in and out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError

from merging.arguments import PLACE, checked
from merging.errors import DataError
from merging.report.curve import Curve
from merging.report.drift import DriftReport
from merging.report.entry import Entry
from merging.report.findings import findings
from merging.report.scores import Means, TaskReport, means
from merging.report.solver import ParameterFate, SolverRow

SURGERY_NOTE = (
    "The calibrated weights equal the merged ones. At inference the task must be known, and its correction "
    "in heads/ applied to the final feature before the head reads it; without it the model is the merged one."
)
_ANEW = "Run the pipeline again into the same folder: it makes the report anew."


class StageReport(Entry):
    """One stage of the run."""

    name: str
    seconds: float
    peak_bytes: int = Field(description="Most memory that the process held during the stage.")


class Report(Entry):
    """What was done, what came of it, at what cost, and caveats. `Report.of` adds means and warnings."""

    format: Literal[1] = 1
    spec: dict[str, Any] = Field(default_factory=dict, description="As it was run, defaults filled in.")
    versions: dict[str, str] = Field(default_factory=dict, description="Package -> version.")
    seed: int = 0
    device: str = "cpu"
    base: str = ""
    experts: dict[str, str] = Field(default_factory=dict, description="Task -> where the expert came from.")
    strategy: str = ""
    calibrators: tuple[str, ...] = ()
    tasks: dict[str, TaskReport] = Field(default_factory=dict)
    means: Means = Means()
    drift: DriftReport = DriftReport()
    solver: tuple[SolverRow, ...] = ()
    parameters: dict[str, ParameterFate] = Field(
        default_factory=dict, description="Each parameter of the model, once."
    )
    coefficients: dict[str, dict[str, float]] = Field(
        default_factory=dict, description="Tensor -> expert -> its coefficient, where the rule learned them."
    )
    curve: Curve | None = Field(default=None, description="The search that chose some of the settings.")
    stages: tuple[StageReport, ...] = ()
    warnings: tuple[str, ...] = ()
    checkpoint: str = Field(default="", description="The final checkpoint.")
    changes_inference: bool = Field(
        default=False, description="Whether the checkpoint alone is not the result."
    )
    inference_note: str = ""

    @classmethod
    def of(cls, *, tasks: Mapping[str, TaskReport], warnings: Sequence[str] = (), **fields: Any) -> Report:
        """The report with its means, and with the warnings that follow from the numbers after those given."""
        if fields.get("changes_inference"):
            fields.setdefault("inference_note", SURGERY_NOTE)
        report = cls(tasks=dict(tasks), means=means(tasks.values()), **fields)
        found = findings(report.tasks, report.solver, report.experts, report.parameters, report.drift)
        if report.curve is not None:
            found += tuple(
                f"the best {path} is the smallest or largest value tried, {report.curve.best[path]}: a wider "
                "sweep may find a better one."
                for path in report.curve.at_an_end
            )
        return report.model_copy(update={"warnings": tuple(dict.fromkeys([*warnings, *found]))})

    @checked(path=PLACE)
    def write(self, path: Path | str) -> None:
        Path(path).write_text(self.model_dump_json(indent=2) + "\n", encoding="utf-8")

    @classmethod
    @checked(path=PLACE)
    def read(cls, path: Path | str) -> Report:
        """Raises DataError for a file that is no report, or one of another format."""
        path = Path(path)
        try:
            found = cls.model_validate_json(path.read_text(encoding="utf-8"))
        except FileNotFoundError as error:
            raise DataError(f"report {path} does not exist") from error
        except OSError as error:
            raise DataError(f"report {path} cannot be read: {error.strerror or error}") from error
        except (ValidationError, UnicodeDecodeError) as error:
            raise DataError(f"{path} is not a report of format 1: {error}", remedy=_ANEW) from error
        if lacking := [name for name in ("format", "spec", "tasks") if name not in found.model_fields_set]:
            what = f'it has no "{lacking[0]}", which every report has'
            raise DataError(f"{path} is not a report of format 1: {what}", remedy=_ANEW)
        return found
