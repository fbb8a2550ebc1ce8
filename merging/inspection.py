"""inspect_checkpoint: what is in a checkpoint, without reading more of it than that takes."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from pydantic import BaseModel, ConfigDict

from merging.contracts.method import Progress, silent
from merging.errors import MergingError

if TYPE_CHECKING:
    from torch import nn

    from merging.checkpoints.source import CheckpointSource, TensorSpec

OUTSIDE = "outside the blocks"
_NUMBERED = re.compile(r"(?:.*?\.)?\d+(?=\.)")


class Result(BaseModel):
    """Frozen; JSON out by `model_dump_json`."""

    model_config = ConfigDict(frozen=True)


class TensorRow(Result):
    """One stored tensor."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int


class Total(Result):
    """All tensors of one dtype."""

    tensors: int
    elements: int
    bytes: int


class Inspection(Result):
    """What is in a checkpoint. `ties`: groups of names that share one tensor, or hold the same values.

    `stacks`: stack -> number of blocks. `feeds`: stack -> groups of linears that share their input in its
    blocks. `notes`: what lies there and is not read, or could not be found out."""

    model: str
    architecture: str | None
    backbone: str | None
    tensors: tuple[TensorRow, ...]
    totals: dict[str, Total]
    stacks: dict[str, int]
    feeds: dict[str, tuple[tuple[str, ...], ...]]
    ties: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...]


def inspect_checkpoint(model: str, *, progress: Progress = silent) -> Inspection:
    """What a folder, file or hub id holds. Values are read only where two tensors may be one."""
    opened = open_model(model)
    specs = {name: opened.source.spec(name) for name in opened.source.names()}
    return Inspection(
        model=str(opened.path),
        architecture=opened.architecture,
        backbone=opened.backbone,
        tensors=tuple(
            TensorRow(name=name, shape=spec.shape, dtype=dtype_of(spec), bytes=spec.bytes)
            for name, spec in specs.items()
        ),
        totals=_totals(specs.values()),
        stacks=opened.stacks or stacks_in(specs),
        feeds=opened.feeds,
        ties=(*_declared_ties(opened.module), *equal_tensors(opened.source, progress)),
        notes=opened.notes,
    )


class OpenModel(NamedTuple):
    """A checkpoint with what its config says. `module` has no data; None where no backbone knows it."""

    path: Path
    source: CheckpointSource
    architecture: str | None
    backbone: str | None
    module: nn.Module | None
    stacks: dict[str, int]
    feeds: dict[str, tuple[tuple[str, ...], ...]]
    notes: tuple[str, ...]


def open_model(model: str) -> OpenModel:
    """A path or a hub id; headers only. What no backbone can walk is opened too; `notes` say why not."""
    from merging.architecture import select_backbone
    from merging.checkpoints.folder import config, open_checkpoint
    from merging.checkpoints.hub import resolve
    from merging.spec.component import AUTO, AutoSettings, Component
    from merging.tracer import feeds_of
    from merging.working_folder import working_folder

    path = resolve(model, folder=working_folder(needed=not Path(model).expanduser().is_absolute())).path
    source = open_checkpoint(path)
    settings = config(path) or {}
    architecture = next(iter(settings.get("architectures") or ()), settings.get("model_type"))
    try:
        backbone = select_backbone(path, Component(type=AUTO, settings=AutoSettings()))
        if backbone is None:
            return OpenModel(path, source, architecture, None, None, {}, {}, source.notes)
        module = backbone.skeleton()
        stacks = {
            stack: len(list(module.get_submodule(stack).children())) for stack in backbone.stacks(module)
        }
        feeds = {stack: tuple(feed.linears for feed in found) for stack, found in feeds_of(backbone).items()}
    except MergingError as error:
        return OpenModel(path, source, architecture, None, None, {}, {}, (*source.notes, error.message))
    return OpenModel(
        path, source, architecture or backbone.name, backbone.name, module, stacks, feeds, source.notes
    )


def stacks_in(names: Iterable[str]) -> dict[str, int]:
    """Stack -> number of blocks, from names alone, for checkpoints whose architecture nobody knows."""
    found: dict[str, set[str]] = {}
    for name in names:
        stack, _, number = block_of(name).rpartition(".")
        if number.isdecimal():
            found.setdefault(stack, set()).add(number)
    return {stack: len(numbers) for stack, numbers in found.items()}


def block_of(name: str) -> str:
    """`encoder.layers.3` for `encoder.layers.3.mlp.fc1.weight`; the outermost number counts."""
    match = _NUMBERED.match(name)
    return match[0] if match else OUTSIDE


def equal_tensors(source: CheckpointSource, progress: Progress = silent) -> tuple[tuple[str, ...], ...]:
    """Groups of stored matrices with the same values; vectors and constants are not taken for ties."""
    alike: dict[object, list[str]] = {}
    for name in source.names():
        spec = source.spec(name)
        if len(spec.shape) >= 2 and spec.elements:
            key = (spec.shape, spec.dtype, _values(source, name, slice(0, 1)))
            alike.setdefault(key, []).append(name)
    candidates = [names for names in alike.values() if len(names) > 1]
    total, done = sum(map(len, candidates)), 0
    groups: list[tuple[str, ...]] = []
    for names in candidates:
        equal: dict[str, list[str]] = {}
        for name in names:
            equal.setdefault(_values(source, name), []).append(name)
            done += 1
            progress("ties", done, total)
        groups += [tuple(same) for same in equal.values() if len(same) > 1 and not _constant(source, same[0])]
    return tuple(groups)


def dtype_of(spec: TensorSpec) -> str:
    return str(spec.dtype).removeprefix("torch.")


def _totals(specs: Iterable[TensorSpec]) -> dict[str, Total]:
    by_dtype: dict[str, list[TensorSpec]] = {}
    for spec in specs:
        by_dtype.setdefault(dtype_of(spec), []).append(spec)
    return {
        dtype: Total(
            tensors=len(found),
            elements=sum(spec.elements for spec in found),
            bytes=sum(spec.bytes for spec in found),
        )
        for dtype, found in by_dtype.items()
    }


def _declared_ties(module: nn.Module | None) -> list[tuple[str, ...]]:
    """Names in the module that share one tensor, which is stored once."""
    if module is None:
        return []
    from merging.checkpoints.names import tied_names

    groups: dict[str, list[str]] = {}
    for name, origin in tied_names(module).items():
        groups.setdefault(origin, [origin]).append(name)
    return [tuple(names) for names in groups.values()]


def _values(source: CheckpointSource, name: str, rows: slice | None = None) -> str:
    """A hash of the bytes."""
    import torch

    tensor = source.read(name, rows).contiguous()
    return hashlib.sha256(tensor.flatten().view(torch.uint8).numpy().tobytes()).hexdigest()


def _constant(source: CheckpointSource, name: str) -> bool:
    tensor = source.read(name)
    return bool((tensor == tensor.flatten()[0]).all())
