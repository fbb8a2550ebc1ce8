"""TaskVectors: expert minus base for each mergeable parameter, read while one walks over them.

Shape letters: N experts, S the shape of the parameter (or of a block of its rows).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

import torch
from torch import Tensor

from merging.checkpoints.source import CopyRows, TensorSpec
from merging.contracts.kept_rows import KeptRows
from merging.contracts.method import Progress, silent
from merging.contracts.models import Models
from merging.finite import refuse_unless_finite
from merging.limits import USUAL, Limits
from merging.ranks import ALONE, Ranks
from merging.threads import in_threads

BLOCK_ELEMENTS = 1 << 19  # of a row block, per model: 4 MiB in float64, enough that calls cost little
_MODELS = 4  # as many have blocks of that size; more have smaller ones, so that memory stays what it is
KEPT_BLOCKS = 32  # of one parameter, as many models together as have full blocks, as they are stored

Item = TypeVar("Item")
Visitor: TypeAlias = Callable[[str, Tensor], None]


class TaskVectors:
    """Expert minus base for each mergeable parameter, read while one walks. Can be walked several times.

    Experts come in the order of their names, whatever the order of listing, and so do all sums over them.
    `threads`: how many may walk at once. Row blocks are small enough for one each; whole tensors are not.
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
        ranks: Ranks = ALONE,
        limits: Limits = USUAL,
    ) -> None:
        """`differences=False`: the experts' weights themselves. `base=False`: base_S has no data."""
        self._models, self._blocked = models, blocked
        self._differences, self._base = differences, base or differences
        self._progress = progress
        self.dtype = dtype
        sources = (models.base, *models.experts.values())
        together = blocked and all(source.concurrent for source in sources)
        self.threads = (limits.threads or torch.get_num_threads()) if together else 1
        self._row_block = limits.row_block or usual_row_block(len(models.experts) + 1)
        self._place = threading.local()
        self._ranks = ranks
        self.experts: tuple[str, ...] = tuple(sorted(models.tasks))
        experts = [models.experts[task] for task in self.experts]
        self._sources = [models.base, *experts] if self._base else experts
        self.names: dict[str, None] = {
            name: None
            for name in models.base.names()
            if models.base.spec(name).dtype.is_floating_point and name not in models.kept
        }

        self._itemsize = max((models.base.spec(name).dtype.itemsize for name in self.names), default=0)

    @property
    def offset(self) -> int:
        """Of the block that this thread was last handed: the place of its first entry in the flattened
        parameter."""
        return getattr(self._place, "offset", 0)

    def elements(self) -> int:
        """Number of mergeable parameters."""
        return sum(self._models.base.spec(name).elements for name in self.names)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._models.base.spec(name).shape

    def blocks(self, name: str) -> Iterator[tuple[slice | None, Tensor, Tensor]]:
        """(rows, base_S, deltas_NS) of one parameter; `rows` is None where the tensor comes whole.

        The blocks of one parameter share memory: each is valid until the next is asked for.
        """
        return self._walk(name, self._rows(name))

    def _rows(self, name: str) -> list[slice | None]:
        return row_blocks(self._models.base.spec(name), self._row_block) if self._blocked else [None]

    def _walk(self, name: str, blocks: list[slice | None]) -> Iterator[tuple[slice | None, Tensor, Tensor]]:
        spec = self._models.base.spec(name)
        height = max((rows.stop - rows.start for rows in blocks if rows is not None), default=None)
        stack_MS = self._empty(spec, height)
        with self._reading(name) as copies:
            for rows in blocks:
                part_MS = stack_MS if rows is None else stack_MS[:, : rows.stop - rows.start]
                self._place.offset = 0 if rows is None else rows.start * (spec.elements // spec.shape[0])
                yield rows, *self._read_into(part_MS, name, rows, copies)

    def read(self, name: str, rows: slice | None = None) -> tuple[Tensor, Tensor]:
        """base_S and deltas_NS. The difference is taken in `dtype` or wider, whatever the storage."""
        spec = self._models.base.spec(name)
        height = None if rows is None else len(range(*rows.indices(spec.shape[0])))
        with self._reading(name) as copies:
            return self._read_into(self._empty(spec, height), name, rows, copies)

    def count(self) -> int:
        """How many blocks a whole walk has."""
        return sum(len(self._rows(name)) for name in self.names)

    def total_(self, sums: Tensor) -> Tensor:
        """Sums of what this process visited -> of all processes', in place."""
        return self._ranks.total_(sums)

    def gathered(self, parts: dict[str, Item]) -> dict[str, Item]:
        """By parameter, what this process found -> what all found."""
        return {name: part for theirs in self._ranks.gather(parts) for name, part in theirs.items()}

    def share(self, names: Iterable[str]) -> list[str]:
        """Those of the parameters that this process is to walk."""
        names = list(names)
        return self._ranks.mine(names, [self._models.base.spec(name).elements for name in names])

    def visit(self, action: Visitor, *, every: int = 1, whole: bool = False) -> None:
        """`action(name, deltas_NS)` for every mergeable parameter, in row blocks where the rule is
        element-wise: the blocks of a parameter in order, parameters in any, from several threads.

        `every`: only one block in so many. `whole`: also those that are other processes' share."""
        chosen, place = {}, 0
        for name in self.names:
            blocks = self._rows(name)
            chosen[name] = [rows for index, rows in enumerate(blocks, place) if index % every == 0]
            place += len(blocks)
        wanted = [name for name, blocks in chosen.items() if blocks]
        chosen = {name: chosen[name] for name in (wanted if whole else self.share(wanted))}
        offset = self.offset

        def walk(name: str) -> None:
            for _, _, deltas_NS in self._walk(name, chosen[name]):
                action(name, deltas_NS)

        for done, _ in enumerate(in_threads(walk, chosen, self.threads), 1):
            self._progress("scan", done, len(chosen))
        self._place.offset = offset  # whoever asked may be in the middle of a block

    def _empty(self, spec: TensorSpec, height: int | None) -> Tensor:
        shape = spec.shape if height is None else (height, *spec.shape[1:])
        return torch.empty((len(self._sources), *shape), dtype=torch.promote_types(self.dtype, spec.dtype))

    @contextmanager
    def kept(self) -> Iterator[None]:
        """For one parameter that this thread walks over several times: its files are read once, as far as
        `kept_entries` go."""
        most = kept_entries(self._row_block, len(self._models.experts) + 1)
        self._place.kept = KeptRows(most * self._itemsize)
        try:
            yield
        finally:
            self._place.kept = None

    @contextmanager
    def _reading(self, name: str) -> Iterator[list[CopyRows]]:
        """What fills in each of `_sources`."""
        kept: KeptRows | None = getattr(self._place, "kept", None)
        with ExitStack() as stack:
            copies = [stack.enter_context(source.reading(name)) for source in self._sources]
            if kept is not None:
                copies = [
                    kept.copying(model, source, name, copy)
                    for model, (source, copy) in enumerate(zip(self._sources, copies, strict=True))
                ]
            yield copies

    def _read_into(
        self, stack_MS: Tensor, name: str, rows: slice | None, copies: list[CopyRows]
    ) -> tuple[Tensor, Tensor]:
        parts = stack_MS.unbind()
        for index, (part_S, copy) in enumerate(zip(parts, copies, strict=True)):
            copy(part_S, rows, parts[0] if self._differences and index else None)
        if not self._blocked:
            for part_S, source in zip(parts, self._sources, strict=True):
                refuse_unless_finite(part_S, label=source.label, name=name)
        if not self._base:
            return torch.empty(stack_MS.shape[1:], dtype=stack_MS.dtype, device="meta"), stack_MS
        return parts[0], stack_MS[1:]


@dataclass(frozen=True)
class Changed:
    """Task vectors with `change(name, deltas_NS)` in place of deltas_NS, made anew at every walk."""

    vectors: TaskVectors
    change: Callable[[str, Tensor], Tensor]

    @property
    def experts(self) -> Sequence[str]:
        return self.vectors.experts

    def total_(self, sums: Tensor) -> Tensor:
        return self.vectors.total_(sums)

    def gathered(self, parts: dict[str, Item]) -> dict[str, Item]:
        return self.vectors.gathered(parts)

    def count(self) -> int:
        return self.vectors.count()

    def visit(self, action: Visitor, *, every: int = 1) -> None:
        self.vectors.visit(lambda name, deltas_NS: action(name, self.change(name, deltas_NS)), every=every)


@dataclass(frozen=True)
class Held:
    """Task vectors in memory: (name, deltas_NS) of each block."""

    parts: Sequence[tuple[str, Tensor]]

    @property
    def experts(self) -> Sequence[str]:
        return [str(place) for place in range(len(self.parts[0][1]))] if self.parts else []

    def total_(self, sums: Tensor) -> Tensor:
        return sums

    def gathered(self, parts: dict[str, Item]) -> dict[str, Item]:
        return parts

    def count(self) -> int:
        return len(self.parts)

    def visit(self, action: Visitor, *, every: int = 1) -> None:
        for name, deltas_NS in self.parts[::every]:
            action(name, deltas_NS)


def usual_row_block(models: int) -> int:
    """Entries of a row block, per model, where so many are read together."""
    return max(1, BLOCK_ELEMENTS * _MODELS // max(models, _MODELS))


def kept_entries(row_block: int, models: int) -> int:
    """How many of one parameter, all models together, are kept where it is walked over twice: blocks that are
    smaller because there are more models do not leave less room."""
    return KEPT_BLOCKS * row_block * max(models, _MODELS) // _MODELS


def row_blocks(spec: TensorSpec, most: int | None = None) -> list[slice | None]:
    """Slices of the first axis, of about `most` (if not given, BLOCK_ELEMENTS) entries each; [None] where all
    fit in one."""
    most = most or BLOCK_ELEMENTS
    if not spec.shape or spec.elements <= most:
        return [None]
    step = max(1, most // (spec.elements // spec.shape[0]))
    return [slice(start, min(start + step, spec.shape[0])) for start in range(0, spec.shape[0], step)]
