"""ProbSurgery: as Surgery, with a distribution over what a feature is wrong by.

Shape letters: N all examples of a task, F final feature.
"""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import Field

from merging.calibrators.feature_correction import FeatureCorrector
from merging.contracts.method import Progress
from merging.settings import Rate, Steps, Width
from merging.settings import Settings as BaseSettings

if TYPE_CHECKING:
    from torch import Tensor

    from merging.calibrators.prob_surgery_training import BiasDistribution


class ProbSurgery(FeatureCorrector):
    """Learn a distribution of each task's feature bias, and subtract its mean (Wei et al., 2025).

    h = relu(W_up f), z ~ N(W_mean h, exp(W_var h)); trained with Adam on mean |f - z - f_expert| plus
    divergence * KL, one sample per step; at inference f' = f - W_mean h. The checkpoint equals the merged
    one; at inference the task must be known and its correction applied. Departs from the paper in training on
    calibration examples: the authors take those of the test set.
    """

    name = "prob_surgery"
    paper = "PMLR 267:66015 (ICML 2025)"

    class Settings(BaseSettings):
        """The authors' values."""

        hidden: Width = Field(128, description="Hidden size of a module.")
        divergence: float = Field(
            1e-4,
            ge=0,
            le=1000,
            description="Weight of the divergence from the standard normal (KL) in the loss.",
        )
        steps: Steps = Field(500, description="Steps of Adam per task.")
        batch_size: Width = Field(16, description="Examples per step, from a new permutation per round.")
        learning_rate: Rate = Field(1e-3, description="Of Adam.")

    def trained(
        self, task: str, merged_NF: Tensor, expert_NF: Tensor, progress: Progress
    ) -> BiasDistribution:
        from merging.calibrators.feature_training import drawn_batches
        from merging.calibrators.prob_surgery_training import initial, train_prob_surgery

        settings = self.settings
        per_round = -(-len(merged_NF) // settings.batch_size)
        batches = drawn_batches(
            len(merged_NF),
            iterations=-(-settings.steps // per_round),
            batches=per_round,
            batch_size=settings.batch_size,
            seed=self.seed,
            task=task,
        )
        return train_prob_surgery(
            merged_NF,
            expert_NF,
            initial(merged_NF.shape[1], settings.hidden, seed=self.seed, task=task),
            batches=self.told(islice(batches, settings.steps), task, settings.steps, progress),
            learning_rate=settings.learning_rate,
            divergence_weight=settings.divergence,
            seed=self.seed,
            task=task,
        )

    def save_plugins(self, folder: Path) -> list[Path]:
        from merging.calibrators.prob_surgery_training import save_distribution

        return [save_distribution(one, task, folder) for task, one in self.corrections.items()]

    def load_plugins(self, folder: Path) -> None:
        from merging.calibrators.prob_surgery_training import load_distributions

        self.corrections = dict(load_distributions(folder))
