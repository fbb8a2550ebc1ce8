"""Representation Surgery: the merged weights stay, a small module per task corrects the final feature.

Shape letters: B examples of a batch, N all examples of a task, F final feature.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field

from merging.contracts.calibrator import Calibrator
from merging.contracts.merger import MergeNotes
from merging.contracts.method import Progress, silent
from merging.errors import DataError, NumericalError, RuleError
from merging.layerwise import Placed
from merging.settings import Settings as BaseSettings

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from torch import Tensor, nn

    from merging.calibrators.surgery_training import FeatureCorrection
    from merging.checkpoints.sink import CheckpointSink
    from merging.checkpoints.source import CheckpointSource
    from merging.contracts.backbone import Backbone
    from merging.contracts.models import Models
    from merging.data.task import CalibrationData, Examples


class Surgery(Placed, Calibrator):
    """Learn a low-rank correction of each task's final feature (Yang et al., 2024).

    f' = f - W_up relu(W_down f), trained with Adam on the mean absolute difference to the expert's features.
    The checkpoint equals the merged one; at inference the task must be known and its correction applied.
    Departs from the paper in training on the calibration examples: the authors take those of the test set.
    """

    paper = "arXiv:2402.02705"
    memory = "one whole model at a time, and the final features of all calibration examples"
    changes_inference = True

    class Settings(BaseSettings):
        """The authors' values."""

        rank: int = Field(16, ge=1, description="Hidden size of a correction (r).")
        iterations: int = Field(500, ge=1, description="Rounds; each draws its batches anew.")
        batches: int = Field(2, ge=1, description="Batches, and so steps of Adam, per round and task.")
        batch_size: int = Field(16, ge=1, description="Examples per batch.")
        learning_rate: float = Field(1e-3, gt=0, description="Of Adam.")

    def __init__(self, settings: BaseSettings | None = None, *, seed: int = 0, **values: Any) -> None:
        super().__init__(settings, seed=seed, **values)
        self.corrections: dict[str, FeatureCorrection] = {}

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
            self.corrections[task] = self._trained(task, merged_NF.pop(task), expert_NF, progress)
        for name in merged.names():
            sink.write(name, merged.read(name))
        return MergeNotes(
            last_loss={task: one.last_loss for task, one in self.corrections.items()},
            left=dict.fromkeys(merged.names(), "surgery leaves the weights as they are"),
        )

    def adapt(self, features_BF: Tensor, task: str) -> Tensor:
        if task not in self.corrections:
            known = ", ".join(self.corrections) or "none"
            raise RuleError(f'surgery has no correction for task "{task}"; there are: {known}')
        return self.corrections[task](features_BF)

    def save_plugins(self, folder: Path) -> list[Path]:
        from merging.calibrators.surgery_training import save_correction

        return [save_correction(one, task, folder) for task, one in self.corrections.items()]

    def load_plugins(self, folder: Path) -> None:
        from merging.calibrators.surgery_training import load_corrections

        self.corrections = load_corrections(folder)

    def _backbone(self, models: Models, data: CalibrationData) -> Backbone:
        if models.backbone is None:
            raise RuleError("surgery has to run the models, and their architecture is not known")
        missing = [task for task in models.tasks if task not in data]
        if missing:
            raise DataError(
                f"no calibration examples for {', '.join(missing)}",
                remedy='Give each expert a "calibration" source under "tasks".',
            )
        return models.backbone

    def _trained(
        self, task: str, merged_NF: Tensor, expert_NF: Tensor, progress: Progress
    ) -> FeatureCorrection:
        from merging.calibrators.surgery_training import drawn_batches, initial, train_surgery

        settings = self.settings
        total = settings.iterations * min(settings.batches, -(-len(merged_NF) // settings.batch_size))

        def told(batches: Iterable[Tensor]) -> Iterator[Tensor]:
            for done, rows_B in enumerate(batches, start=1):
                yield rows_B
                progress(f'surgery of task "{task}"', done, total)

        start = initial(merged_NF.shape[1], settings.rank, seed=self.seed, task=task)
        batches = drawn_batches(
            len(merged_NF),
            iterations=settings.iterations,
            batches=settings.batches,
            batch_size=settings.batch_size,
            seed=self.seed,
            task=task,
        )
        return train_surgery(
            merged_NF, expert_NF, start, batches=told(batches), learning_rate=settings.learning_rate
        )


def _features(model: nn.Module, backbone: Backbone, examples: Examples, who: str, task: str) -> Tensor:
    """Final features (N F) of all examples."""
    import torch

    from merging.evaluation.forward import all_features

    features_NF = torch.cat(list(all_features(model, backbone, examples)))
    if not bool(torch.isfinite(features_NF).all()):
        raise NumericalError(f'features of the {who} on task "{task}" are NaN or infinite')
    return features_NF
