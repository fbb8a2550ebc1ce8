"""TIES: trim the task vectors, elect a sign per entry, merge what agrees.

Shape letters: N experts, S the shape of the parameter.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from merging.contracts.merger import TensorMerger
from merging.settings import Scale
from merging.settings import Settings as BaseSettings

if TYPE_CHECKING:
    from torch import Tensor

    from merging.contracts.vectors import TaskVectors
    from merging.task_vectors import Majority
    from merging.trimming import Trim


class Ties(TensorMerger):
    """Trim each task vector to its largest entries, elect a sign per entry, merge the entries that agree.

    t_i = trim(W_i - W_0); s = sgn(sum_i w_i t_i); W = W_0 + scale * sum_A w_i t_i / sum_A w_i,
    entry by entry, where A are the experts with sgn(w_i t_i) = s. Yadav et al., 2023.
    """

    paper = "arXiv:2306.01708"
    memory = (
        'a row block of the base and of each expert, in float64; with trim "tensor" up to 32 as stored, '
        'and with elect "normfrac" the whole largest tensor'
    )
    weighted = True
    precision = "float64"
    passes = 14.0
    together = True

    class Settings(BaseSettings):
        scale: Scale = Field(1.0, description="Weight of the merged task vector (lambda).")
        density: float = Field(0.2, gt=0, le=1, description="Share of entries kept by the trim (k, K).")
        trim: Literal["model", "tensor"] = Field(
            "model",
            description="What the share is counted in: the whole task vector, as published, or each tensor.",
        )
        elect: Literal["mass", "normfrac"] = Field(
            "mass",
            description="Who elects an entry's sign: the sum of the trimmed vectors, or the expert for which "
            "the entry is the largest part of its norm.",
        )
        merge: Literal["mean", "sum", "max"] = Field(
            "mean", description="What becomes of the entries that agree: their mean, sum, or the largest."
        )

    _thresholds_N: Tensor
    _trims: dict[str, Trim]
    _norms_N: Tensor
    _of_model: Majority

    @property
    def elementwise(self) -> bool:
        return self.settings.trim == "model" or self.surveys

    @property
    def surveys(self) -> bool:
        return self.settings.trim == "tensor" and self.settings.elect == "mass"

    @property
    def walks(self) -> int:
        return 2 if self.elementwise else 1

    def prepare(self, vectors: TaskVectors) -> None:
        from merging.contracts.vectors import Changed
        from merging.task_vectors import Majority, norms
        from merging.thresholds import magnitude_thresholds

        self._trims = {}
        self._of_model = Majority(vectors, lambda _, deltas_NS: self._balance(deltas_NS))
        if self.settings.trim == "model":
            self._thresholds_N = magnitude_thresholds(vectors, self.settings.density)
        if self.settings.elect == "normfrac":
            self._norms_N = norms(Changed(vectors, lambda _, deltas_NS: self._trimmed(deltas_NS)))

    def survey(self, name: str) -> None:
        if self.surveys:
            from merging.trimming import Trim

            entries = math.prod(self.vectors.shape(name))
            self._trims[name] = Trim(
                lambda: (deltas_NS for _, _, deltas_NS in self.vectors.blocks(name)),
                max(1, int(self.settings.density * entries)),
                entries,
            )

    def combine(self, name: str, base_S: Tensor, deltas_NS: Tensor) -> Tensor:
        from merging.task_vectors import elect_and_merge, merge_agreeing, onto

        settings, weights_N = self.settings, self.weights_N
        if settings.elect == "mass":
            thresholds_N = self._trims[name].of_block(deltas_NS) if self.surveys else self._thresholds_N
            merged_S = elect_and_merge(deltas_NS, thresholds_N, weights_N, settings.merge, self._majority)
        else:
            trimmed_NS = self._trimmed(deltas_NS)
            sign_S = self._elected(trimmed_NS)
            merged_S = merge_agreeing(trimmed_NS, sign_S, weights_N, settings.merge, self._majority)
        return onto(base_S, merged_S, settings.scale)

    def _trimmed(self, deltas_NS: Tensor) -> Tensor:
        """The trimmed task vectors, times the experts' weights."""
        from merging.task_vectors import trim, trim_each, weighed_

        if self.settings.trim == "model":
            trimmed_NS = trim(deltas_NS, self._thresholds_N)
        else:
            trimmed_NS = trim_each(deltas_NS, self.settings.density)
        return weighed_(trimmed_NS, self.weights_N)

    def _elected(self, trimmed_NS: Tensor) -> Tensor:
        from merging.task_vectors import elect_by_largest_share, elect_by_mass

        if self.settings.elect == "mass":
            return elect_by_mass(trimmed_NS)
        return elect_by_largest_share(trimmed_NS, self._norms_N)

    def _balance(self, deltas_NS: Tensor) -> int:
        from merging.task_vectors import balance

        if self.settings.elect == "mass":
            return balance(deltas_NS, self._thresholds_N, self.weights_N)
        return int(self._elected(self._trimmed(deltas_NS)).sum())

    def _majority(self) -> int:
        """The sign for entries where the experts cancel: + per tensor, else what most of the model elects."""
        if self.settings.trim == "tensor":
            return 1
        return self._of_model.sign()
