"""From a spec's components to the methods themselves, ready to work."""

from __future__ import annotations

from pathlib import Path

from merging.components import calibrators, strategies
from merging.contracts.calibrator import Calibrator
from merging.contracts.merger import Merger
from merging.layer_settings import LayerSettings
from merging.layerwise import Placed
from merging.opening import Opened
from merging.spec import PipelineSpec
from merging.strategies.checkpoint import Checkpoint


def make_merger(spec: PipelineSpec, opened: Opened, device: str, work: Path | None) -> Merger:
    """The spec's merge rule, ready to merge."""
    merger: Merger = strategies.get(spec.merge.type)(spec.merge.settings, seed=spec.seed)
    merger.layers = LayerSettings(spec.merge.layers)
    if isinstance(merger, Placed):
        merger.device, merger.work = device, work
    if isinstance(merger, Checkpoint):
        merger.source = opened.merged
    return merger


def make_calibrators(spec: PipelineSpec, device: str, work: Path | None) -> list[Calibrator]:
    """The spec's calibrators, in order."""
    made: list[Calibrator] = [
        calibrators.get(one.type)(one.settings, seed=spec.seed) for one in spec.calibrate
    ]
    for calibrator in made:
        if isinstance(calibrator, Placed):
            calibrator.device, calibrator.work = device, work
    return made
