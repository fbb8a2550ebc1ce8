"""FeatureCorrector: the merged weights stay, a small module per task corrects the feature for its head.

Shape letters: B examples of a batch, N all examples of a task, F final feature.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, ClassVar

from merging.contracts.calibrator import Calibrator
from merging.contracts.merger import MergeNotes
from merging.contracts.method import Progress, silent
from merging.errors import NumericalError, RuleError
from merging.layerwise import Placed
from merging.settings import Settings as BaseSettings

if TYPE_CHECKING:
    from torch import Tensor, nn

    from merging.checkpoints.sink import CheckpointSink
    from merging.checkpoints.source import CheckpointSource
    from merging.contracts.backbone import Backbone
    from merging.contracts.models import Models
    from merging.data.task import CalibrationData, Examples


class FeatureCorrector(Placed, Calibrator):
    """Trains one module per task on the final features of merged model and expert; subclasses say which.

    A module is callable, features (B F) to features, and has a `last_loss`.
    """

    memory: ClassVar[str] = "one whole model at a time, and the final features of all calibration examples"
    changes_inference = True

    def __init__(self, settings: BaseSettings | None = None, *, seed: int = 0, **values: Any) -> None:
        super().__init__(settings, seed=seed, **values)
        self.corrections: dict[str, Any] = {}

    @abstractmethod
    def trained(self, task: str, merged_NF: Tensor, expert_NF: Tensor, progress: Progress) -> Any:
        """The task's module."""

    def calibrate(
        self,
        merged: CheckpointSource,
        models: Models,
        data: CalibrationData,
        sink: CheckpointSink,
        *,
        progress: Progress = silent,
    ) -> MergeNotes:
        from merging.streaming import load_model

        backbone = self._backbone(models, data)
        model = load_model(backbone, merged, device=self.device)
        merged_NF = {
            task: _features(model, backbone, data[task], "merged model", task) for task in models.tasks
        }
        del model
        for task, expert in models.experts.items():
            model = load_model(backbone, expert, device=self.device)
            expert_NF = _features(model, backbone, data[task], f'expert "{task}"', task)
            del model  # before the next expert is loaded
            self.corrections[task] = self.trained(task, merged_NF.pop(task), expert_NF, progress)
        for name in merged.names():
            sink.write(name, merged.read(name))
        return MergeNotes(
            last_loss={task: one.last_loss for task, one in self.corrections.items()},
            left=dict.fromkeys(merged.names(), f"{self.name or 'it'} leaves the weights as they are"),
        )

    def adapt(self, features_BF: Tensor, task: str) -> Tensor:
        if task not in self.corrections:
            known = ", ".join(self.corrections) or "none"
            raise RuleError(f'{self.name} has no correction for task "{task}"; there are: {known}')
        corrected_BF: Tensor = self.corrections[task](features_BF)
        return corrected_BF

    def told(self, batches: Iterable[Tensor], task: str, total: int, progress: Progress) -> Iterator[Tensor]:
        """The batches, with a sign of progress after each."""
        for done, rows_B in enumerate(batches, start=1):
            yield rows_B
            progress(f'{self.name} of task "{task}"', done, total)

    def _backbone(self, models: Models, data: CalibrationData) -> Backbone:
        if models.backbone is None:
            raise RuleError(f"{self.name} has to run the models, and their architecture is not known")
        data.require(models.tasks)
        return models.backbone


def _features(model: nn.Module, backbone: Backbone, examples: Examples, who: str, task: str) -> Tensor:
    """Final features (N F) of all examples."""
    import torch

    from merging.evaluation.forward import all_features

    features_NF = torch.cat(list(all_features(model, backbone, examples)))
    if not bool(torch.isfinite(features_NF).all()):
        raise NumericalError(f'features of the {who} on task "{task}" are NaN or infinite')
    return features_NF
