"""LayerwiseMerger and LayerwiseCalibrator: a LayerRule as a merge rule, and as a calibrator."""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from merging.contracts.calibrator import Calibrator
from merging.contracts.layer_rule import LayerRule
from merging.contracts.merger import MergeNotes, Merger
from merging.contracts.method import Progress, silent
from merging.errors import DataError
from merging.limits import Limits

if TYPE_CHECKING:
    from torch import Tensor

    from merging.checkpoints.sink import CheckpointSink
    from merging.checkpoints.source import CheckpointSource
    from merging.contracts.models import Models
    from merging.costs.cost import Cost
    from merging.costs.sizes import Sizes
    from merging.data.task import CalibrationData
    from merging.moments import Moments
    from merging.normal_equations import NormalEquations
    from merging.ranks import Ranks
    from merging.solved_blocks import SolvedBlocks

_MEMORY = "one block of two models + 16 D² bytes per feed of a block + one batch; flat in depth and N"


class Placed:
    """Where a sweep runs; set by the pipeline."""

    device: str = "cpu"
    precision: Literal["float32", "mixed", "float64"] = "float32"  # of forwards, products and sums
    work: Path | None = None  # where activations go that memory does not hold
    limits: Limits
    known: SolvedBlocks | None = None  # where a sweep keeps solved blocks, so that a killed run goes on
    ranks: Ranks | None = None  # the processes of the run; None: there is one

    def computing(self) -> dict[str, Any]:
        """For who needs gradients: nothing is mixed."""
        import torch

        return {
            "device": self.device,
            "dtype": torch.float64 if self.precision == "float64" else torch.float32,
        }

    def place(self) -> dict[str, Any]:
        """For sweeps."""
        import torch

        from merging.ranks import ALONE

        mixed = {"dtype": torch.bfloat16} if self.precision == "mixed" else {}
        return {
            **self.computing(),
            **mixed,
            "work": self.work,
            "activation_memory": self.limits.activation_memory,
            "known": self.known,
            "ranks": self.ranks or ALONE,
        }


class LayerwiseMerger(Placed, LayerRule, Merger):
    """A merge rule that solves linears; everything else is the weighted mean of the experts."""

    needs = frozenset({"base", "data"})
    memory: ClassVar[str] = _MEMORY
    weighted = True
    together = True

    def at(self, name: str) -> LayerRule:
        settings = self.settings_for(name)
        if settings == self.settings:
            return self
        rule = copy(self)
        rule.settings = settings
        return rule

    @classmethod
    def check(cls, settings: Any, weights: Mapping[str, float]) -> list[str]:
        if weights and abs(sum(weights.values())) < 1e-8:
            return ["the weights sum to 0, and tensors that are not solved are the weighted mean"]
        return []

    def cost(self, sizes: Sizes) -> Cost:
        from merging.costs.sweep_law import sweep_cost

        return sweep_cost(self, sizes)

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
        return _notes(
            Sweep(self, AverageSource(models), models, data, sink, **self.place(), progress=progress)
        )


class ShrunkGramMerger(LayerwiseMerger):
    """RegMean's arithmetic, whoever's inputs are measured: shrunk Grams, unseen directions at the average.

    Subclasses have a setting `shrink`.
    """

    by_layer = frozenset({"shrink"})

    def add(self, equations: NormalEquations, weight_OD: Tensor, moments: Moments) -> None:
        equations.add(weight_OD, moments.gram_DD, tokens=moments.tokens, shrink=self.settings.shrink)

    def solve(self, equations: NormalEquations, merged_OD: Tensor, base_OD: Tensor) -> Tensor:
        return equations.solve(anchor_OD=merged_OD)


class LayerwiseCalibrator(Placed, LayerRule, Calibrator):
    """A calibrator that solves linears (biases and norms, if the rule says so) of an already merged model."""

    memory: ClassVar[str] = _MEMORY
    together = True

    def cost(self, sizes: Sizes) -> Cost:
        from merging.costs.sweep_law import sweep_cost

        return sweep_cost(self, sizes)

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

        return _notes(Sweep(self, merged, models, data, sink, **self.place(), progress=progress))


def _notes(sweep: object) -> MergeNotes:
    from merging.sweep import Sweep

    assert isinstance(sweep, Sweep)
    notes = sweep.run()
    return MergeNotes(
        health={name: asdict(health) for name, health in notes.health.items()},
        solved=notes.solved,
        left=notes.left,
    )
