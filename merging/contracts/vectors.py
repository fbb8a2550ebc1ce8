"""TaskVectors: expert minus base for each mergeable parameter, read while one walks over them.

Shape letters: N experts, S the shape of the parameter (or of a block of its rows).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from merging.checkpoints.source import CheckpointSource, TensorSpec
from merging.contracts.method import Progress, silent
from merging.contracts.models import Models
from merging.errors import CheckpointError

BLOCK_ELEMENTS = (
    1 << 18
)  # entries of a row block, per model: 2 MiB in float64, so that a block stays in cache


class TaskVectors:
    """Expert minus base for each mergeable parameter, read while one iterates. Can be walked several times.

    Experts come in the order of their names, whatever the order of listing, and so do all sums over them.
    """

    def __init__(
        self,
        models: Models,
        dtype: torch.dtype,
        *,
        blocked: bool,
        differences: bool = True,
        base: bool = True,
        progress: Progress = silent,
    ) -> None:
        """`differences=False`: the experts' weights themselves. `base=False`: base_S has no data."""
        self._models, self._blocked = models, blocked
        self._differences, self._base = differences, base or differences
        self._progress = progress
        self.dtype = dtype
        self.offset = (
            0  # of the block last handed out: the place of its first entry in the flattened parameter
        )
        self.experts: tuple[str, ...] = tuple(sorted(models.tasks))
        self.names: dict[str, None] = {
            name: None
            for name in models.base.names()
            if models.base.spec(name).dtype.is_floating_point and name not in models.kept
        }

    def elements(self) -> int:
        """Number of mergeable parameters."""
        return sum(self._models.base.spec(name).elements for name in self.names)

    def blocks(self, name: str) -> Iterator[tuple[slice | None, Tensor, Tensor]]:
        """(rows, base_S, deltas_NS) of one parameter; `rows` is None where the tensor comes whole.

        The blocks of one parameter share memory: each is valid until the next is asked for.
        """
        spec = self._models.base.spec(name)
        blocks = row_blocks(spec) if self._blocked else [None]
        height = blocks[0].stop if blocks[0] is not None else None
        stack_MS = self._empty(spec, height)
        for rows in blocks:
            part_MS = stack_MS if rows is None else stack_MS[:, : rows.stop - rows.start]
            self.offset = 0 if rows is None else rows.start * (spec.elements // spec.shape[0])
            yield rows, *self._read_into(part_MS, name, rows)

    def read(self, name: str, rows: slice | None = None) -> tuple[Tensor, Tensor]:
        """base_S and deltas_NS. The difference is taken in `dtype` or wider, whatever the storage."""
        spec = self._models.base.spec(name)
        height = None if rows is None else len(range(*rows.indices(spec.shape[0])))
        return self._read_into(self._empty(spec, height), name, rows)

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """(name, deltas_NS) over all mergeable parameters, in row blocks where the rule is element-wise."""
        total, done = self.elements(), 0
        for name in self.names:
            for _, _, deltas_NS in self.blocks(name):
                yield name, deltas_NS
                done += deltas_NS[0].numel()
                self._progress("scan", done, total)

    def _empty(self, spec: TensorSpec, height: int | None) -> Tensor:
        shape = spec.shape if height is None else (height, *spec.shape[1:])
        models = len(self.experts) + int(self._base)
        return torch.empty((models, *shape), dtype=torch.promote_types(self.dtype, spec.dtype))

    def _read_into(self, stack_MS: Tensor, name: str, rows: slice | None) -> tuple[Tensor, Tensor]:
        if self._base:
            base_S, experts_NS = stack_MS[0], stack_MS[1:]
            _copy_into(base_S, self._models.base, name, rows)
        else:
            base_S, experts_NS = (
                torch.empty(stack_MS.shape[1:], dtype=stack_MS.dtype, device="meta"),
                stack_MS,
            )
        for expert_S, task in zip(experts_NS, self.experts, strict=True):
            _copy_into(expert_S, self._models.experts[task], name, rows)
            if self._differences:
                expert_S.sub_(base_S)
        return base_S, experts_NS


@dataclass(frozen=True)
class Changed:
    """Task vectors with `change(name, deltas_NS)` in place of deltas_NS, made anew at every walk."""

    vectors: TaskVectors
    change: Callable[[str, Tensor], Tensor]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for name, deltas_NS in self.vectors:
            yield name, self.change(name, deltas_NS)


def row_blocks(spec: TensorSpec) -> list[slice | None]:
    """Slices of the first axis, of about BLOCK_ELEMENTS entries each; [None] where all fit in one."""
    if not spec.shape or spec.elements <= BLOCK_ELEMENTS:
        return [None]
    step = max(1, BLOCK_ELEMENTS // (spec.elements // spec.shape[0]))
    return [slice(start, min(start + step, spec.shape[0])) for start in range(0, spec.shape[0], step)]


def _copy_into(target_S: Tensor, source: CheckpointSource, name: str, rows: slice | None) -> None:
    tensor_S = source.read(name, rows)
    if tensor_S.shape != target_S.shape:  # copy_ would broadcast without a word
        raise CheckpointError(
            f'{source.label}: "{name}" has shape {tuple(tensor_S.shape)}, the base {tuple(target_S.shape)}'
        )
    target_S.copy_(tensor_S)
