"""Model Breadcrumbs: leave out the largest and the smallest entries of the task vectors, add up the rest.

Shape letters: N experts, S the shape of the parameter.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from pydantic import Field

from merging.contracts.merger import TensorMerger
from merging.settings import Scale
from merging.settings import Settings as BaseSettings

if TYPE_CHECKING:
    from torch import Tensor

    from merging.contracts.vectors import TaskVectors
    from merging.trimming import Trim


class Breadcrumbs(TensorMerger):
    """Leave out the largest and the smallest entries of each task vector, and add the rest to the base.

    Of the n entries of a tensor the int(gamma n) largest go, then the smallest until int(density n) are left:
    t_i; W = W_0 + scale * sum_i w_i t_i. Davari and Belilovsky, 2023.
    """

    paper = "arXiv:2312.06795"
    memory = "three row blocks of the base and of each expert, in float64, and up to 32 as stored"
    weighted = True
    precision = "float64"
    passes = 30.0
    together = True

    class Settings(BaseSettings):
        scale: Scale = Field(0.3, description="Weight of the summed task vectors (alpha).")
        density: float = Field(
            0.9, gt=0, le=1, description="Share of entries of each tensor kept (1 - beta)."
        )
        gamma: float = Field(0.01, ge=0, lt=1, description="Share of entries dropped as the largest (gamma).")
        elect: bool = Field(
            False, description="Merge only entries of the elected sign, as in TIES; else all."
        )
        normalize: bool = Field(False, description="Divide by the weights of the entries that are merged.")

    _within: dict[str, Trim]
    _outliers: dict[str, Trim]

    @property
    def elementwise(self) -> bool:
        return True

    @property
    def walks(self) -> int:
        return 2

    def arrays(self, experts: int) -> float:
        return 3 * (experts + 1.0)

    def prepare(self, vectors: TaskVectors) -> None:
        self._within, self._outliers = {}, {}

    def survey(self, name: str) -> None:
        from merging.sparsifying import between
        from merging.trimming import Trim

        entries = math.prod(self.vectors.shape(name))
        kept, outliers = between(entries, self.settings.density, self.settings.gamma)

        def deltas() -> Iterator[Tensor]:
            return (deltas_NS for _, _, deltas_NS in self.vectors.blocks(name))

        self._within[name] = Trim(deltas, kept + outliers, entries)
        if outliers:
            self._outliers[name] = Trim(deltas, outliers, entries)

    def combine(self, name: str, base_S: Tensor, deltas_NS: Tensor) -> Tensor:
        from merging.sparsifying import combined
        from merging.task_vectors import masked, onto

        settings = self.settings
        keep_NS = self._within[name].mask(deltas_NS)
        if name in self._outliers:
            keep_NS &= ~self._outliers[name].mask(deltas_NS)
        merged_S = combined(
            masked(deltas_NS, keep_NS.numpy()),
            self.weights_N,
            elect=settings.elect,
            normalize=settings.normalize,
        )
        return onto(base_S, merged_S, settings.scale)
