"""Every error a user can meet: what is wrong, where, what was expected and what to do."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Literal, NamedTuple


class Problem(NamedTuple):
    """One finding: `where` is a file or a path in the spec, `what` says what was found and expected."""

    where: str
    what: str
    remedy: str = ""
    name: str = ""  # by which the spec's `allow` lets it through, if it may
    gravity: Literal["error", "warning"] = "error"

    def __str__(self) -> str:
        line = f"{self.where}: {self.what}" if self.where else self.what
        if self.name:
            line = f"{line} [{self.name}]"
        if self.gravity == "warning":
            line = f"warning: {line}"
        return f"{line}\n    {self.remedy}" if self.remedy else line

    def named(self, name: str, *, warning: bool = False) -> Problem:
        """The same, with its name and gravity."""
        return self._replace(name=name, gravity="warning" if warning else "error")


class MergingError(Exception):
    """Base of all errors of this package; `exit_code` is what the command line answers: 2 where nothing was
    computed yet."""

    exit_code = 1

    def __init__(self, message: str, *, remedy: str = "", problems: Sequence[Problem] = ()) -> None:
        self.message, self.remedy, self.problems = str(message), remedy, tuple(problems)
        super().__init__(str(self))

    def __str__(self) -> str:
        lines = [self.message, *(f"  {problem}" for problem in self.problems)]
        return "\n".join([*lines, f"  {self.remedy}"] if self.remedy else lines)


@contextmanager
def run_begun(kind: type[MergingError] = MergingError) -> Iterator[None]:
    """Errors of that kind in the block are a run's that failed, whatever they are beforehand: exit code 1."""
    try:
        yield
    except kind as error:
        error.exit_code = 1
        raise


class SpecError(MergingError):
    """The request itself is wrong: spec, arguments, names, settings."""

    exit_code = 2


class CheckpointError(MergingError):
    """A checkpoint is missing, damaged, unsafe or does not fit the base."""

    exit_code = 2


class DataError(MergingError):
    """Calibration or test data is missing, empty or of the wrong kind."""

    exit_code = 2


class OutputError(MergingError):
    """The output folder cannot be used: it belongs to another spec, another run, or to the user."""

    exit_code = 2


class TracingError(MergingError):
    """A model cannot be walked block by block."""


class NumericalError(MergingError):
    """A value that is not finite turned up during the run."""


class RuleError(MergingError):
    """A merge rule or calibrator (often a plug-in) failed or returned something unusable."""
