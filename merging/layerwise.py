"""LayerwiseMerger and LayerwiseCalibrator: a LayerRule as a merge rule, and as a calibrator."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from merging.contracts.calibrator import Calibrator
from merging.contracts.layer_rule import LayerRule
from merging.contracts.merger import Merger, MergeNotes
from merging.contracts.method import Progress, silent
from merging.errors import DataError

if TYPE_CHECKING:
    from merging.checkpoints.sink import CheckpointSink
    from merging.checkpoints.source import CheckpointSource
    from merging.contracts.models import Models
    from merging.data.task import CalibrationData

_MEMORY = "one block of two models + per feed of a block 8 D² (3 of 4 bytes, 1 of 8) + one batch; flat in depth and N"


class LayerwiseMerger(LayerRule, Merger):
    """A merge rule that solves linears; everything else is the weighted mean of the experts."""

    needs = frozenset({"base", "data"})
    memory: ClassVar[str] = _MEMORY
    weighted = True
    device: str = "cpu"
    work: Path | None = None  # where activations go that memory does not hold

    def merge(
        self,
        models: Models,
        data: CalibrationData | None,
        sink: CheckpointSink,
        *,
        progress: Progress = silent,
    ) -> MergeNotes:
        from merging.averaging import AverageSource
        from merging.sweep import Sweep

        if data is None:
            raise DataError(f'strategy "{self.name}" needs calibration examples for each expert')
        sweep = Sweep(
            self, AverageSource(models), models, data, sink, device=self.device, work=self.work, progress=progress
        )
        return _notes(sweep)


class LayerwiseCalibrator(LayerRule, Calibrator):
    """A calibrator that solves linears (biases and norms, if the rule says so) of an already merged model."""

    memory: ClassVar[str] = _MEMORY
    device: str = "cpu"
    work: Path | None = None

    def calibrate(
        self,
        merged: CheckpointSource,
        models: Models,
        data: CalibrationData,
        sink: CheckpointSink,
        *,
        progress: Progress = silent,
    ) -> MergeNotes:
        from merging.sweep import Sweep

        sweep = Sweep(self, merged, models, data, sink, device=self.device, work=self.work, progress=progress)
        return _notes(sweep)


def _notes(sweep: object) -> MergeNotes:
    from merging.sweep import Sweep

    assert isinstance(sweep, Sweep)
    notes = sweep.run()
    return MergeNotes(
        health={name: asdict(health) for name, health in notes.health.items()},
        solved=notes.solved,
        left=notes.left,
    )
