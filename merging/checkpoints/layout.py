"""Where each tensor of a checkpoint that is still to be written will lie: shards, headers, offsets."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from merging.checkpoints.header import Place, write_header
from merging.checkpoints.source import CheckpointSource, TensorSpec

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class Layout:
    """File -> its header, and file -> tensor -> place. `index`: text of the index, None for a single file."""

    headers: Mapping[str, bytes]
    places: Mapping[str, Mapping[str, Place]]
    index: str | None

    def size(self, file: str) -> int:
        """Bytes of the file when it is whole."""
        return max([len(self.headers[file]), *(place.stop for place in self.places[file].values())])

    @property
    def bytes(self) -> int:
        """Bytes of all files."""
        return sum(self.size(file) for file in self.headers)


def plan_layout(
    like: CheckpointSource,
    *,
    dtype: torch.dtype | None = None,
    shard_size: int | None = None,
    single_file: str | None = None,
) -> Layout:
    """The base's own shards if `shard_size` is None and it has an index; else split by size, in its order.

    `single_file`: whatever the size, one file of that name."""
    specs = {name: stored_spec(like.spec(name), dtype) for name in like.names()}
    if single_file is not None:
        shards = [list(specs)]
    else:
        shards = _as_in(like) if shard_size is None else _by_size(specs, shard_size)
    files = {}
    for number, names in enumerate(shards, 1):
        file = (
            (single_file or SINGLE)
            if len(shards) == 1
            else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        )
        files[file] = {name: specs[name] for name in names}
    headers, places = {}, {}
    for file, held in files.items():
        headers[file], places[file] = write_header(held, {"format": "pt"})
    return Layout(headers, places, _index(files) if len(files) > 1 else None)


def stored_spec(spec: TensorSpec, dtype: torch.dtype | None) -> TensorSpec:
    """What is stored for a tensor of the base: `dtype` overrides that of floating-point tensors only."""
    return TensorSpec(spec.shape, dtype) if dtype is not None and spec.dtype.is_floating_point else spec


def _as_in(like: CheckpointSource) -> list[list[str]]:
    shards: dict[str | None, list[str]] = {}
    for name in like.names():
        shards.setdefault(like.shard(name), []).append(name)
    return list(shards.values()) or [[]]


def _by_size(specs: Mapping[str, TensorSpec], limit: int) -> list[list[str]]:
    shards: list[list[str]] = [[]]
    filled = 0
    for name, spec in specs.items():
        if shards[-1] and filled + spec.bytes > limit:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += spec.bytes
    return shards


def _index(files: Mapping[str, Mapping[str, TensorSpec]]) -> str:
    total = sum(spec.bytes for held in files.values() for spec in held.values())
    elements = sum(spec.elements for held in files.values() for spec in held.values())
    placement = {name: file for file, held in files.items() for name in held}
    content = {
        "metadata": {"total_parameters": elements, "total_size": total},
        "weight_map": dict(sorted(placement.items())),
    }
    return json.dumps(content, indent=2, sort_keys=True) + "\n"
