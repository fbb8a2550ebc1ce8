"""DARE-TIES: drop entries at random, then merge as TIES does.

Shape letters: N experts, S the shape of the parameter.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from merging.contracts.merger import TensorMerger
from merging.settings import Scale
from merging.settings import Settings as BaseSettings

if TYPE_CHECKING:
    from torch import Tensor

    from merging.contracts.vectors import TaskVectors
    from merging.task_vectors import Majority


class DareTies(TensorMerger):
    """Drop entries of each task vector at random, rescale the rest, then elect signs and merge what agrees.

    t_i = m_i (W_i - W_0) / density with m_i ~ Bernoulli(density), then TIES on t_i. Yu et al., 2024.
    """

    paper = "arXiv:2311.03099"
    memory = (
        'a row block of the base and of each expert, in float64; with rescale "norm" up to 32 as stored, '
        "and with a trim, too, the whole largest tensor"
    )
    weighted = True
    precision = "float64"
    passes = 20.0
    together = True

    class Settings(BaseSettings):
        scale: Scale = Field(1.0, description="Weight of the merged task vector (lambda).")
        density: float = Field(
            0.5, gt=0, le=1, description="Share of entries kept by the random drop (1 - p)."
        )
        rescale: Literal["expectation", "norm", "none"] = Field(
            "expectation",
            description="What is kept is divided by the density, scaled to each tensor's L1 norm from before "
            "the drop, or left as it is.",
        )
        trim: float = Field(
            1.0,
            gt=0,
            le=1,
            description="Share of entries of the whole dropped task vector that TIES keeps (K); 1: no trim.",
        )
        merge: Literal["mean", "sum", "max"] = Field(
            "mean", description="What becomes of the entries that agree: their mean, sum, or the largest."
        )

    _thresholds_N: Tensor
    _of_model: Majority
    _factors: dict[str, Tensor]

    @property
    def elementwise(self) -> bool:
        return self.settings.rescale != "norm" or self.settings.trim == 1

    @property
    def surveys(self) -> bool:
        return self.settings.rescale == "norm" and self.settings.trim == 1 and self.settings.density < 1

    @property
    def walks(self) -> int:
        return 2 if self.surveys else 1

    def survey(self, name: str) -> None:
        from merging.sparsifying import norm_factors_

        if self.surveys:
            self._factors[name] = norm_factors_(
                (deltas_NS, self.draws(name, deltas_NS, self.settings.density))
                for _, _, deltas_NS in self.vectors.blocks(name)
            )

    def prepare(self, vectors: TaskVectors) -> None:
        from merging.contracts.vectors import Changed
        from merging.task_vectors import Majority, balance
        from merging.thresholds import magnitude_thresholds

        def of_block(name: str, deltas_NS: Tensor) -> int:
            return balance(self._dropped(name, deltas_NS), self._thresholds_N, self.weights_N)

        self._factors = {}
        self._of_model = Majority(vectors, of_block)
        self._thresholds_N = magnitude_thresholds(Changed(vectors, self._dropped), self.settings.trim)

    def combine(self, name: str, base_S: Tensor, deltas_NS: Tensor) -> Tensor:
        from merging.task_vectors import elect_and_merge, onto

        merged_S = elect_and_merge(
            self._dropped(name, deltas_NS),
            self._thresholds_N,
            self.weights_N,
            self.settings.merge,
            self._majority,
        )
        return onto(base_S, merged_S, self.settings.scale)

    def _dropped(self, name: str, deltas_NS: Tensor) -> Tensor:
        from merging.sparsifying import drop_

        if self.settings.density == 1:
            return deltas_NS
        keep_NS = self.draws(name, deltas_NS, self.settings.density)
        factors_N = self._factors.get(name)
        return drop_(deltas_NS, keep_NS, self.settings.density, self.settings.rescale, factors_N)

    def _majority(self) -> int:
        """The sign for entries where the experts cancel: + without a trim, else as in TIES."""
        return 1 if self.settings.trim == 1 else self._of_model.sign()
