"""Representation Surgery: the merged weights stay, a small module per task corrects the final feature.

Shape letters: N all examples of a task, F final feature.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import Field

from merging.calibrators.feature_correction import FeatureCorrector
from merging.contracts.method import Progress
from merging.settings import Rate, Steps, Width
from merging.settings import Settings as BaseSettings

if TYPE_CHECKING:
    from torch import Tensor

    from merging.calibrators.surgery_training import FeatureCorrection


class Surgery(FeatureCorrector):
    """Learn a low-rank correction of each task's final feature (Yang et al., 2024).

    f' = f - W_up relu(W_down f), trained with Adam on the mean absolute difference to the expert's features.
    The checkpoint equals the merged one; at inference the task must be known and its correction applied.
    Departs from the paper in training on the calibration examples: the authors take those of the test set.
    """

    name = "surgery"
    paper = "arXiv:2402.02705"

    class Settings(BaseSettings):
        """The authors' values."""

        rank: Width = Field(16, description="Hidden size of a correction (r).")
        iterations: Steps = Field(500, description="Rounds; each draws its batches anew.")
        batches: Steps = Field(2, description="Batches, and so steps of Adam, per round and task.")
        batch_size: Width = Field(16, description="Examples per batch.")
        learning_rate: Rate = Field(1e-3, description="Of Adam.")

    def trained(
        self, task: str, merged_NF: Tensor, expert_NF: Tensor, progress: Progress
    ) -> FeatureCorrection:
        from merging.calibrators.feature_training import drawn_batches
        from merging.calibrators.surgery_training import initial, train_surgery

        settings = self.settings
        batches = drawn_batches(
            len(merged_NF),
            iterations=settings.iterations,
            batches=settings.batches,
            batch_size=settings.batch_size,
            seed=self.seed,
            task=task,
        )
        total = settings.iterations * min(settings.batches, -(-len(merged_NF) // settings.batch_size))
        return train_surgery(
            merged_NF,
            expert_NF,
            initial(merged_NF.shape[1], settings.rank, seed=self.seed, task=task),
            batches=self.told(batches, task, total, progress),
            learning_rate=settings.learning_rate,
        )

    def save_plugins(self, folder: Path) -> list[Path]:
        from merging.calibrators.surgery_training import save_correction

        return [save_correction(one, task, folder) for task, one in self.corrections.items()]

    def load_plugins(self, folder: Path) -> None:
        from merging.calibrators.surgery_training import load_corrections

        self.corrections = dict(load_corrections(folder))
