"""compare_checkpoints: size and direction of a task vector block by block, and what does not fit the base."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from merging.contracts.method import Progress, silent
from merging.inspection import OpenModel, Result, block_of, dtype_of, open_model

if TYPE_CHECKING:
    from merging.checkpoints.source import CheckpointSource, TensorSpec


class BlockDifference(Result):
    """Tensors of one block: norms, and the task vector's relative to the base's; None where that is 0."""

    block: str
    tensors: int
    base_norm: float
    difference: float
    relative: float | None
    cosine: float | None


class Misfit(Result):
    """A tensor that the two do not have alike."""

    tensor: str
    kind: Literal["missing", "extra", "shape", "dtype"]
    base: str
    model: str


class Comparison(Result):
    """How far a model is from its base, block by block and in all."""

    base: str
    model: str
    blocks: tuple[BlockDifference, ...]
    total: BlockDifference
    misfits: tuple[Misfit, ...]


def compare_checkpoints(base: str, model: str, *, progress: Progress = silent) -> Comparison:
    """Folders, files or hub ids; tensors are read side by side, a block of rows at a time."""
    opened = open_model(base)
    other = _adapted(opened, base, model) or open_model(model)
    pairs = _pairs(opened, other)
    sums: dict[str, _Sums] = {}
    total, done = sum(opened.source.spec(name).bytes for name in pairs), 0
    for name, twin in pairs.items():
        spec, found = opened.source.spec(name), other.source.spec(twin)
        if spec.shape == found.shape and spec.dtype.is_floating_point and found.dtype.is_floating_point:
            sums.setdefault(block_of(name), _Sums()).add(opened.source, name, other.source, twin)
        done += spec.bytes
        progress("compare", done, total)
    return Comparison(
        base=str(opened.path),
        model=str(other.path),
        blocks=tuple(one.difference(block) for block, one in sums.items()),
        total=_Sums(sums.values()).difference("all"),
        misfits=tuple(_misfits(opened.source, other.source, pairs)),
    )


def _adapted(opened: OpenModel, base: str, model: str) -> OpenModel | None:
    """The base with an adapter on it, where `model` is the folder or hub id of one."""
    from merging.checkpoints.hub import resolve
    from merging.checkpoints.lora import is_adapter, open_adapter
    from merging.working_folder import working_folder

    path = resolve(model, folder=working_folder(needed=not Path(model).expanduser().is_absolute())).path
    if not is_adapter(path):
        return None
    source = open_adapter(path, opened.source, opened.module, base_name=base, base_folder=opened.path)
    return opened._replace(path=path, source=source, notes=(*opened.notes, *source.notes))


def _pairs(base: OpenModel, model: OpenModel) -> dict[str, str]:
    """The base's names -> the model's: the same name, else the same place in the base's module."""
    theirs = {name: name for name in model.source.names()}
    if base.module is None:
        return {name: name for name in base.source.names() if name in theirs}
    from merging.checkpoints.names import module_names

    places = module_names(base.module, base.source.names()).renamed
    found = {place: name for name, place in module_names(base.module, theirs).renamed.items()}
    paired = {name: theirs.get(name) or found.get(places.get(name, name)) for name in base.source.names()}
    return {name: twin for name, twin in paired.items() if twin is not None}


def _misfits(base: CheckpointSource, model: CheckpointSource, pairs: Mapping[str, str]) -> Iterable[Misfit]:
    for name in base.names():
        spec = base.spec(name)
        if name not in pairs:
            yield Misfit(tensor=name, kind="missing", base=_shown(spec), model="-")
            continue
        found = model.spec(pairs[name])
        if spec.shape != found.shape:
            yield Misfit(tensor=name, kind="shape", base=_shown(spec), model=_shown(found))
        elif spec.dtype != found.dtype:
            yield Misfit(tensor=name, kind="dtype", base=_shown(spec), model=_shown(found))
    taken = set(pairs.values())
    for name in model.names():
        if name not in taken:
            yield Misfit(tensor=name, kind="extra", base="-", model=_shown(model.spec(name)))


def _shown(spec: TensorSpec) -> str:
    return f"{' x '.join(map(str, spec.shape)) or 'scalar'} {dtype_of(spec)}"


class _Sums:
    """Squares and products over tensors, in float64."""

    def __init__(self, parts: Iterable[_Sums] = ()) -> None:
        parts = list(parts)
        self.tensors: int = sum(part.tensors for part in parts)
        self.base: float = sum(part.base for part in parts)
        self.model: float = sum(part.model for part in parts)
        self.product: float = sum(part.product for part in parts)
        self.delta: float = sum(part.delta for part in parts)

    def add(self, base: CheckpointSource, name: str, model: CheckpointSource, twin: str) -> None:
        import torch

        from merging.contracts.vectors import row_blocks

        self.tensors += 1
        for rows in row_blocks(base.spec(name)):
            base_S = base.read(name, rows).to(torch.float64).flatten()
            model_S = model.read(twin, rows).to(torch.float64).flatten()
            delta_S = model_S - base_S
            self.base += float(base_S @ base_S)
            self.model += float(model_S @ model_S)
            self.product += float(base_S @ model_S)
            self.delta += float(delta_S @ delta_S)

    def difference(self, block: str) -> BlockDifference:
        norms = math.sqrt(self.base) * math.sqrt(self.model)
        return BlockDifference(
            block=block,
            tensors=self.tensors,
            base_norm=math.sqrt(self.base),
            difference=math.sqrt(self.delta),
            relative=math.sqrt(self.delta / self.base) if self.base else None,
            cosine=max(-1.0, min(1.0, self.product / norms)) if norms else None,
        )
