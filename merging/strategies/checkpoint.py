"""Checkpoint: a model that was merged elsewhere, as the start of a calibration."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from merging.contracts.merger import MergeNotes, Merger
from merging.contracts.method import Progress, silent
from merging.errors import CheckpointError, Problem, RuleError
from merging.settings import Settings as BaseSettings

if TYPE_CHECKING:
    from merging.checkpoints.sink import CheckpointSink
    from merging.checkpoints.source import CheckpointSource
    from merging.contracts.models import Models
    from merging.data.task import CalibrationData


class Checkpoint(Merger):
    """A model that was merged elsewhere, taken as it is.

    W = the given checkpoint's; what no rule may touch (integers, heads of one task) is the base's.
    """

    needs = frozenset()
    memory = "a row block of one tensor"
    source: CheckpointSource | None = None  # the opened `model`; whoever runs the merge sets it before

    class Settings(BaseSettings):
        model: str = Field(description="Folder or hub id of the merged model.")
        revision: str | None = Field(None, description="Branch, tag or commit, for a hub id.")

    def merge(
        self,
        models: Models,
        data: CalibrationData | None,
        sink: CheckpointSink,
        *,
        progress: Progress = silent,
    ) -> MergeNotes:
        from merging.contracts.vectors import row_blocks

        if self.source is None:
            raise RuleError(f'the merged model "{self.settings.model}" was not opened before the merge')
        taken = [
            name
            for name in models.base.names()
            if models.base.spec(name).dtype.is_floating_point and name not in models.kept
        ]
        self._refuse_misfits(models.base, self.source, taken)
        taken_names = set(taken)
        total = sum(models.base.spec(name).bytes for name in models.base.names())
        done = 0
        for name in models.base.names():
            source = self.source if name in taken_names else models.base
            for rows in row_blocks(models.base.spec(name)):
                sink.write(name, source.read(name, rows), rows)
            done += models.base.spec(name).bytes
            progress("merge", done, total)
        return MergeNotes()

    def _refuse_misfits(self, base: CheckpointSource, source: CheckpointSource, names: list[str]) -> None:
        present = set(source.names())
        problems = [Problem(name, "is missing") for name in names if name not in present]
        problems += [
            Problem(name, f"has shape {source.spec(name).shape}, the base {base.spec(name).shape}")
            for name in names
            if name in present and source.spec(name).shape != base.spec(name).shape
        ]
        if problems:
            raise CheckpointError(f"{source.label} does not fit the base", problems=problems)
