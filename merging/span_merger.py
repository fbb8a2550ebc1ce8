"""SpanMerger: a merge rule whose result is a sum of the models, weighed by how they lie to each other.

Shape letters: M models that span the result, S the shape of a parameter (or of a block of its rows).
"""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING

from merging.contracts.merger import TensorMerger

if TYPE_CHECKING:
    from torch import Tensor

    from merging.contracts.vectors import TaskVectors


class SpanMerger(TensorMerger):
    """A rule that needs no more of a parameter than the inner products of the models. Subclass it and write
    `factors`.

    A parameter is walked over twice in row blocks, so that memory does not grow with its size; what was read
    stays for the second time, as far as some blocks go. The models are those that `deltas_NS` holds in
    `combine`, after the base where `with_base` says so.
    """

    precision = "float64"
    passes = 8.0
    together = True
    _factors: dict[str, Tensor]

    @property
    def elementwise(self) -> bool:
        return True

    @property
    def walks(self) -> int:
        return 2

    @property
    def with_base(self) -> bool:
        """Whether the base is one of the models whose products are taken."""
        return False

    @abstractmethod
    def factors(self, products_MM: Tensor) -> Tensor:
        """Each model's factor in the result (M), from the inner products of all, summed over a parameter."""

    def prepare(self, vectors: TaskVectors) -> None:
        self._factors = {}

    def survey(self, name: str) -> None:
        import torch

        from merging import native
        from merging.task_vectors import weighted_sum

        products = []
        for _, base_S, deltas_NS in self.vectors.blocks(name):
            models_MS = self._models(base_S, deltas_NS)
            if native.stacked(models_MS):
                products.append(native.products(models_MS))
            else:
                models_ME = models_MS.reshape(len(models_MS), base_S.numel())
                products.append(models_ME @ models_ME.T)
        self._factors[name] = self.factors(weighted_sum(torch.stack(products)))

    def combine(self, name: str, base_S: Tensor, deltas_NS: Tensor) -> Tensor:
        from merging.task_vectors import onto, weighted_sum

        sum_S = weighted_sum(self._models(base_S, deltas_NS), self._factors[name])
        return onto(base_S, sum_S, 1) if self.differences else sum_S

    def _models(self, base_S: Tensor, deltas_NS: Tensor) -> Tensor:
        import torch

        if not self.with_base:
            return deltas_NS
        if _before(base_S, deltas_NS):
            shape = (len(deltas_NS) + 1, *base_S.shape)
            return base_S.as_strided(shape, deltas_NS.stride(), base_S.storage_offset())
        return torch.cat([base_S[None], deltas_NS])


def _before(base_S: Tensor, deltas_NS: Tensor) -> bool:
    """Whether the base lies in memory as one more model before the first."""
    return bool(
        base_S.untyped_storage().data_ptr() == deltas_NS.untyped_storage().data_ptr()
        and base_S.storage_offset() + deltas_NS.stride(0) == deltas_NS.storage_offset()
        and base_S.stride() == deltas_NS.stride()[1:]
        and base_S.dtype == deltas_NS.dtype
    )
