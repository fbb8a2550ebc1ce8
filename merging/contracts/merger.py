"""Merger: turns base and experts into one model. TensorMerger sees one parameter at a time.

Shape letters: N experts, S the shape of the parameter.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, ClassVar, Literal

from merging.errors import MergingError, RuleError
from merging.contracts.method import Method, Progress, silent

if TYPE_CHECKING:
    from torch import Tensor

    from merging.checkpoints.sink import CheckpointSink
    from merging.data.task import CalibrationData
    from merging.contracts.models import Models

BLOCK_ELEMENTS = 1 << 22  # elements of a row block of an element-wise rule: 16 MiB in float32 per model


class Merger(Method, ABC):
    """Base and experts in, one model out, written tensor by tensor."""

    @abstractmethod
    def merge(
        self,
        models: Models,
        data: CalibrationData | None,
        sink: CheckpointSink,
        *,
        progress: Progress = silent,
    ) -> MergeNotes:
        """Write every tensor of the base, merged, to `sink` (which the caller opens and closes)."""

    @classmethod
    def coefficients(cls, settings: object, weights: Mapping[str, float]) -> dict[str, float] | None:
        """The factor with which each expert enters the result, where the method has one; printed by `plan`."""
        return None


class MergeNotes(dict[str, object]):
    """What a method wants the report to say about its run (health of solves, tensors left alone, ...)."""


class TensorMerger(Merger):
    """A rule for one parameter at a time. Subclass it and write `combine`; nothing else is needed.

    In `combine`, `self.settings` are the validated settings, `self.weights_N` the experts' weights and `self.experts`
    their names, in the order of `deltas_NS`.
    """

    needs = frozenset({"base"})
    elementwise: ClassVar[bool] = False  # True: may be handed row blocks of a tensor, to bound memory
    precision: ClassVar[Literal["float32", "float64"]] = "float32"
    experts: tuple[str, ...] = ()
    weights_N: Tensor

    def prepare(self, vectors: TaskVectors) -> None:
        """An optional look at all task vectors before the first `combine`, for whole-model quantities."""

    @abstractmethod
    def combine(self, name: str, base_S: Tensor, deltas_NS: Tensor) -> Tensor:
        """The merged parameter, of the base's shape; `deltas_NS` are expert minus base, in `precision`."""

    def merge(
        self,
        models: Models,
        data: CalibrationData | None,
        sink: CheckpointSink,
        *,
        progress: Progress = silent,
    ) -> MergeNotes:
        import torch

        vectors = TaskVectors(models, getattr(torch, self.precision), blocked=self.elementwise)
        self.experts = models.tasks
        self.weights_N = torch.tensor([models.weights[task] for task in models.tasks], dtype=vectors.dtype)
        self.prepare(vectors)
        total = sum(models.base.spec(name).bytes for name in models.base.names())
        done = 0
        for name in models.base.names():
            if name in vectors.names:
                for rows, base_S, deltas_NS in vectors.blocks(name):
                    sink.write(name, self._combined(name, base_S, deltas_NS), rows)
            else:
                sink.write(name, models.base.read(name))
            done += models.base.spec(name).bytes
            progress("merge", done, total)
        return MergeNotes()

    def _combined(self, name: str, base_S: Tensor, deltas_NS: Tensor) -> Tensor:
        try:
            merged_S = self.combine(name, base_S, deltas_NS)
        except MergingError:
            raise
        except Exception as error:
            raise RuleError(
                f'strategy "{self.name}" failed on tensor "{name}": {type(error).__name__}: {error}',
                remedy="Run with --debug for the traceback.",
            ) from error
        shape = getattr(merged_S, "shape", None)
        if shape != base_S.shape:
            raise RuleError(
                f'strategy "{self.name}" returned {_described(merged_S)} for tensor "{name}", '
                f"expected a tensor of shape {tuple(base_S.shape)}"
            )
        return merged_S


def _described(value: object) -> str:
    shape = getattr(value, "shape", None)
    return f"shape {tuple(shape)}" if shape is not None else f"a {type(value).__name__}"


class TaskVectors:
    """Expert minus base for each mergeable parameter, computed while one iterates. Can be walked several times."""

    def __init__(self, models: Models, dtype: object, *, blocked: bool) -> None:
        import torch

        self._models, self._blocked = models, blocked
        self.dtype: torch.dtype = dtype  # type: ignore[assignment]
        self.names: dict[str, None] = {
            name: None
            for name in models.base.names()
            if models.base.spec(name).dtype.is_floating_point and name not in models.kept
        }

    @property
    def experts(self) -> tuple[str, ...]:
        return self._models.tasks

    def elements(self) -> int:
        """Number of mergeable parameters."""
        return sum(self._models.base.spec(name).elements for name in self.names)

    def blocks(self, name: str) -> Iterator[tuple[slice | None, Tensor, Tensor]]:
        """(rows, base_S, deltas_NS) of one parameter; `rows` is None where the tensor comes whole."""
        for rows in self._rows(name):
            base_S, deltas_NS = self.read(name, rows)
            yield rows, base_S, deltas_NS

    def read(self, name: str, rows: slice | None = None) -> tuple[Tensor, Tensor]:
        """base_S and deltas_NS. The difference is taken in `dtype`, whatever the storage."""
        import torch

        base_S = self._models.base.read(name, rows).to(self.dtype)
        deltas_NS = torch.empty((len(self.experts), *base_S.shape), dtype=self.dtype)
        for delta_S, expert in zip(deltas_NS, self._models.experts.values(), strict=True):
            torch.sub(expert.read(name, rows).to(self.dtype), base_S, out=delta_S)
        return base_S, deltas_NS

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """(name, deltas_NS) over all mergeable parameters, in row blocks where the rule is element-wise."""
        for name in self.names:
            for _, _, deltas_NS in self.blocks(name):
                yield name, deltas_NS

    def _rows(self, name: str) -> list[slice | None]:
        spec = self._models.base.spec(name)
        if not self._blocked or not spec.shape or spec.elements <= BLOCK_ELEMENTS:
            return [None]
        step = max(1, BLOCK_ELEMENTS // max(1, spec.elements // spec.shape[0]))
        return [slice(start, min(start + step, spec.shape[0])) for start in range(0, spec.shape[0], step)]
