"""MatrixMerger: a merge rule for weight matrices, and what it does with all other tensors.

Shape letters: N experts, O outputs and I inputs of a weight, S the shape of any tensor.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from merging.contracts.merger import MergeNotes, TensorMerger
from merging.contracts.method import Progress, silent
from merging.settings import Scale
from merging.settings import Settings as BaseSettings

if TYPE_CHECKING:
    from torch import Tensor

    from merging.checkpoints.sink import CheckpointSink
    from merging.checkpoints.source import CheckpointSource
    from merging.contracts.models import Models
    from merging.costs.cost import Cost, Work
    from merging.costs.sizes import Sizes
    from merging.data.task import CalibrationData


class MatrixMerger(TensorMerger):
    """A rule that turns the task vectors of one matrix into one. Subclass it and write `merge_matrices`.

    Matrices are the tensors with two axes, outputs first: weights that are stored the other way round (GPT-2)
    come transposed. Everything else, and what `skip` names, is averaged or stays the base's.
    """

    class Settings(BaseSettings):
        scale: Scale = Field(
            1.0, description="Weight of the merged task vectors, matrices and others (alpha)."
        )
        others: Literal["mean", "base"] = Field(
            "mean",
            description="What becomes of tensors that are no matrices: the mean of the task vectors is added "
            "to the base, or they stay the base's.",
        )
        skip: tuple[str, ...] = Field(
            ("text_projection",),
            description="Matrices with one of these in their name are treated as the others are.",
        )
        kernels: bool = Field(
            False,
            description="Treat tensors of more than two axes (kernels of convolutions) as matrices too, "
            "of outputs by all the rest.",
        )

    _transposed: frozenset[str] = frozenset()

    @abstractmethod
    def merge_matrices(self, deltas_NOI: Tensor) -> Tensor:
        """One task vector (O I) of those of all experts. No axis is empty."""

    @abstractmethod
    def held(self, longer: int, shorter: int, experts: int) -> list[int]:
        """Bytes of each array that is held for one matrix at most, beside what is read of all models."""

    @abstractmethod
    def operations(self, longer: int, shorter: int, experts: int) -> Work:
        """Of merging one matrix."""

    def cost(self, sizes: Sizes) -> Cost:
        from merging.costs.tensor_law import matrix_rule_cost

        return matrix_rule_cost(self, sizes)

    def merge(
        self,
        models: Models,
        data: CalibrationData | None,
        sink: CheckpointSink,
        *,
        progress: Progress = silent,
    ) -> MergeNotes:
        self._transposed = transposed_weights(models.base)
        return super().merge(models, data, sink, progress=progress)

    def combine(self, name: str, base_S: Tensor, deltas_NS: Tensor) -> Tensor:
        from merging.task_vectors import weighted_sum

        if base_S.numel() and self._is_matrix(name, base_S):
            return base_S + self.settings.scale * self._merged(name, deltas_NS)
        if self.settings.others == "base":
            return base_S
        return base_S + self.settings.scale * (weighted_sum(deltas_NS) / len(deltas_NS))

    def _is_matrix(self, name: str, base_S: Tensor) -> bool:
        if any(part in name for part in self.settings.skip):
            return False
        return base_S.ndim == 2 or (base_S.ndim > 2 and self.settings.kernels)

    def _merged(self, name: str, deltas_NS: Tensor) -> Tensor:
        deltas_NOI = deltas_NS.flatten(2)
        if name in self._transposed:
            return self.merge_matrices(deltas_NOI.transpose(1, 2)).T
        return self.merge_matrices(deltas_NOI).reshape(deltas_NS.shape[1:])


def transposed_weights(source: CheckpointSource) -> frozenset[str]:
    """Names of weights stored as inputs by outputs, as GPT-2 does; their biases tell, as long as the outputs.

    A square weight (`h.3.attn.c_proj`) follows those of its siblings (all called `c_proj`) that are not.
    """
    names = set(source.names())
    turned: dict[str, set[str]] = {}  # by the last part of the module's name
    square: dict[str, set[str]] = {}
    straight: set[str] = set()
    for name in names:
        module, _, leaf = name.rpartition(".")
        shape = source.spec(name).shape
        if leaf != "weight" or len(shape) != 2 or f"{module}.bias" not in names:
            continue
        kind = module.rpartition(".")[2]
        bias = source.spec(f"{module}.bias").shape
        if shape[0] == shape[1]:
            square.setdefault(kind, set()).add(name)
        elif bias == shape[1:]:
            turned.setdefault(kind, set()).add(name)
        else:
            straight.add(kind)
    found = {name for kind in turned for name in turned[kind]}
    return frozenset(found | {name for kind in turned.keys() - straight for name in square.get(kind, ())})
