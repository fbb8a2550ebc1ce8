"""Calibrator: repairs a merged model with a few unlabelled samples per task.

Shape letters: B examples, F final feature.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from merging.contracts.method import Method, Progress, silent

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from merging.checkpoints.sink import CheckpointSink
    from merging.checkpoints.source import CheckpointSource
    from merging.contracts.merger import MergeNotes
    from merging.contracts.models import Models
    from merging.data.task import CalibrationData
    from merging.evaluation.metric import Adapt
    from merging.ranks import Ranks


class Calibrator(Method, ABC):
    """A merged model in, a better one out, of the same architecture (and, for plug-ins, something per task
    beside it)."""

    needs = frozenset({"base", "data"})
    changes_inference: ClassVar[bool] = False  # True: `adapt` must run at inference, with the task known
    together: ClassVar[bool] = False  # whether it knows of other processes of its run, and shares the work
    ranks: Ranks | None = None  # these processes; None: there is one

    @property
    def shares(self) -> bool:
        """Whether it does only this process's share; else the first process does all."""
        return self.together

    @abstractmethod
    def calibrate(
        self,
        merged: CheckpointSource,
        models: Models,
        data: CalibrationData,
        sink: CheckpointSink,
        *,
        progress: Progress = silent,
    ) -> MergeNotes:
        """Write every tensor, calibrated, to `sink`."""

    def adapt(self, features_BF: Tensor, task: str) -> Tensor:
        """What inference must do to the merged model's features; the identity unless the method is a
        plug-in."""
        return features_BF

    def save_plugins(self, folder: Path) -> list[Path]:
        """Write what `adapt` needs, as safetensors, into `folder`; the files written."""
        return []

    def load_plugins(self, folder: Path) -> None:
        """Read what `save_plugins` wrote."""


def adapting(used: Sequence[Calibrator]) -> Adapt:
    """What all of them together do to features at inference."""

    def adapt(features_BF: Tensor, task: str) -> Tensor:
        for calibrator in used:
            features_BF = calibrator.adapt(features_BF, task)
        return features_BF

    return adapt
