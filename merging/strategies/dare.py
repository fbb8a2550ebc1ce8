"""DARE: drop entries of the task vectors at random, rescale the rest, add them up.

Shape letters: N experts, S the shape of the parameter.
"""

from __future__ import annotations

from fnmatch import fnmatch
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from merging.contracts.merger import TensorMerger
from merging.settings import Scale
from merging.settings import Settings as BaseSettings

if TYPE_CHECKING:
    from torch import Tensor

    from merging.contracts.vectors import TaskVectors


class Dare(TensorMerger):
    """Drop entries of each task vector at random, rescale those that are left, and add them to the base.

    t_i = m_i (W_i - W_0) / density with m_i ~ Bernoulli(density); W = W_0 + scale * sum_i w_i t_i.
    Yu et al., 2024.
    """

    paper = "arXiv:2311.03099"
    memory = 'a row block of the base and of each expert, in float64; with rescale "norm" up to 32 as stored'
    weighted = True
    precision = "float64"
    passes = 8.0
    together = True

    class Settings(BaseSettings):
        scale: Scale = Field(0.3, description="Weight of the summed task vectors (lambda).")
        density: float = Field(0.5, gt=0, le=1, description="Share of entries kept (1 - p).")
        rescale: Literal["expectation", "norm", "none"] = Field(
            "expectation",
            description="What is kept is divided by the density, scaled to each tensor's L1 norm from before "
            "the drop, or left as it is.",
        )
        normalize: bool = Field(
            False, description="Divide the sum by the sum of the weights; a sum of 0 counts as 1."
        )
        tensors: tuple[str, ...] = Field(
            ("*",), description="Name patterns of the tensors to drop from; the others are added in full."
        )

    _factors: dict[str, Tensor]

    @property
    def elementwise(self) -> bool:
        return True

    @property
    def surveys(self) -> bool:
        return self.settings.rescale == "norm" and self.settings.density < 1

    @property
    def walks(self) -> int:
        return 2 if self.surveys else 1

    def prepare(self, vectors: TaskVectors) -> None:
        self._factors = {}

    def survey(self, name: str) -> None:
        from merging.sparsifying import norm_factors_

        if self.surveys and self._drops(name):
            self._factors[name] = norm_factors_(
                (deltas_NS, self.draws(name, deltas_NS, self.settings.density))
                for _, _, deltas_NS in self.vectors.blocks(name)
            )

    def combine(self, name: str, base_S: Tensor, deltas_NS: Tensor) -> Tensor:
        from merging.sparsifying import combined, drop_
        from merging.task_vectors import onto

        settings = self.settings
        if settings.density < 1 and self._drops(name):
            keep_NS = self.draws(name, deltas_NS, settings.density)
            factors_N = self._factors.get(name)
            deltas_NS = drop_(deltas_NS, keep_NS, settings.density, settings.rescale, factors_N)
        merged_S = combined(deltas_NS, self.weights_N, elect=False, normalize=settings.normalize)
        return onto(base_S, merged_S, settings.scale)

    def _drops(self, name: str) -> bool:
        return any(fnmatch(name, pattern) for pattern in self.settings.tensors)
