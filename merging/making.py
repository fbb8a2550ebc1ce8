"""From a spec's components to the methods themselves, ready to work."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from merging.checkpoints.folder import open_checkpoint
from merging.checkpoints.lora import is_adapter, open_adapter
from merging.checkpoints.parts import parts_seen
from merging.checkpoints.sink import CheckpointSink
from merging.checkpoints.source import CheckpointSource
from merging.checkpoints.strays import refuse_strays, strays
from merging.components import calibrators, strategies
from merging.contracts.calibrator import Calibrator
from merging.contracts.merger import MergeNotes, Merger
from merging.contracts.method import Progress, silent
from merging.contracts.models import Models
from merging.data.task import CalibrationData
from merging.layer_settings import LayerSettings
from merging.layerwise import Placed
from merging.limits import USUAL, Limits
from merging.opened import Opened
from merging.spec import PipelineSpec
from merging.strategies.checkpoint import Checkpoint


def make_merger(
    spec: PipelineSpec, opened: Opened, device: str, work: Path | None, limits: Limits = USUAL
) -> Merger:
    """The spec's merge rule, ready to merge."""
    merger: Merger = strategies.get(spec.merge.type)(spec.merge.settings, seed=spec.seed)
    merger.layers, merger.limits = LayerSettings(spec.merge.layers), limits
    if isinstance(merger, Placed):
        merger.device, merger.work, merger.precision = device, work, spec.precision
    if isinstance(merger, Checkpoint):
        merger.source = opened.merged
    return merger


def run_merger(
    merger: Merger,
    models: Models,
    data: CalibrationData | None,
    sink: CheckpointSink,
    *,
    progress: Progress = silent,
) -> MergeNotes:
    """Merge into `sink`, with what `layers` leaves out, and fused tensors seen as the backbone's settings
    say."""
    parts = parts_seen(models, type(merger))
    seen = merger.layers.applied(parts.models(models))
    return merger.merge(seen, data, parts.sink(sink), progress=progress)


def open_result(path: Path, opened: Opened) -> CheckpointSource:
    """A checkpoint that this run made, be it a model or an adapter on the base.

    Raises FileNotFoundError where it is there no more, and OutputError where somebody has put other weights
    beside its own."""
    if not path.is_dir():
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
    refuse_strays(path, strays(path))
    if is_adapter(path):
        return open_adapter(path, opened.models.base, opened.outline(), path.name)
    return open_checkpoint(path, path.name)


def make_calibrators(
    spec: PipelineSpec, device: str, work: Path | None, limits: Limits = USUAL
) -> list[Calibrator]:
    """The spec's calibrators, in order."""
    made: list[Calibrator] = [
        calibrators.get(one.type)(one.settings, seed=spec.seed) for one in spec.calibrate
    ]
    for calibrator in made:
        calibrator.limits = limits
        if isinstance(calibrator, Placed):
            calibrator.device, calibrator.work, calibrator.precision = device, work, spec.precision
    return made
