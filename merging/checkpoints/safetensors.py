"""SafetensorsSource: a checkpoint in safetensors files, read tensor by tensor or in rows."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from merging.checkpoints.header import CHANGED, Header, Place, read_header
from merging.checkpoints.scratch import Scratch
from merging.checkpoints.source import CheckpointSource, CopyRows, TensorSpec, fill_
from merging.checkpoints.weight_files import find_safetensors
from merging.errors import CheckpointError, Problem
from merging.spec.wording import counted


class SafetensorsSource(CheckpointSource):
    """A folder, or one file. Headers are checked against the files at once; data is read when asked for.

    `ignored` are other weights in the folder, `metadata` is the files' own. Several threads may read; no
    file is held open.
    """

    # Data is read into memory, not mapped: mapped pages count as the process's memory until it ends, and a
    # file that is cut short while mapped kills the process instead of raising an error.

    def __init__(self, path: Path, label: str = "") -> None:
        self.label = label or str(path)
        found = find_safetensors(path)
        if found is None:
            raise CheckpointError(f"{path} holds no safetensors file")
        self.files, self.ignored = found.files, found.ignored
        self.notes = (found.warning,) if found.warning else ()
        self.metadata: dict[str, str] = {}
        self._sharded = found.placement is not None
        self._headers: dict[Path, Header] = {}
        for file in found.files:
            self._headers[file] = read_header(file)
            self.metadata |= self._headers[file].metadata
        self._places: dict[str, tuple[Path, Place]] = {}
        for file, header in self._headers.items():
            for name, place in header.tensors.items():
                if found.placement is None or found.placement.get(name) == file.name:
                    self._places[name] = (file, place)
                else:
                    self.notes += (f'{file.name} also holds "{name}", which the index does not place there',)
        if found.placement is not None and len(self._places) < len(found.placement):
            lost = [name for name in found.placement if name not in self._places]
            raise CheckpointError(
                f"{found.index} names {counted(len(lost), 'tensor')} that its files do not hold",
                problems=[Problem(found.placement[name], f'has no "{name}"') for name in lost[:10]],
            )

    def names(self) -> tuple[str, ...]:
        return tuple(self._places)

    def spec(self, name: str) -> TensorSpec:
        return self._place(name)[1].spec

    def shard(self, name: str) -> str | None:
        file, _ = self._place(name)
        return file.name if self._sharded else None

    def read(self, name: str, rows: slice | None = None) -> Tensor:
        file, place = self._place(name)
        shape, start, stop = _extent(name, place, rows)
        data = torch.empty(stop - start, dtype=torch.uint8)
        with self._opened(file) as descriptor:
            _fill(descriptor, file, data.numpy().data, start)
        return data.view(place.spec.dtype).view(shape)

    @contextmanager
    def reading(self, name: str) -> Iterator[CopyRows]:
        file, place = self._place(name)
        dtype = place.spec.dtype
        with self._opened(file) as descriptor:

            def copy(target_S: Tensor, rows: slice | None, less_S: Tensor | None) -> None:
                shape, start, stop = _extent(name, place, rows)
                self.check_shape(name, shape, target_S)
                if target_S.dtype == dtype and target_S.is_contiguous() and target_S.device.type == "cpu":
                    _fill(descriptor, file, _bytes(target_S), start)
                    if less_S is not None:
                        target_S.sub_(less_S)
                    return
                data = _READ.bytes(stop - start)
                _fill(descriptor, file, _bytes(data), start)
                fill_(target_S, data.view(dtype).view(shape), less_S)

            yield copy

    @contextmanager
    def _opened(self, file: Path) -> Iterator[int]:
        header = self._headers[file]
        descriptor = os.open(file, os.O_RDONLY)  # one for each reader: threads do not share a position
        try:
            status = os.fstat(descriptor)
            if (status.st_size, status.st_mtime_ns) != (header.size, header.mtime_ns):
                raise CheckpointError(
                    f"{self.label}: {file} was changed while it was being used", remedy=CHANGED
                )
            yield descriptor
        finally:
            os.close(descriptor)

    def _place(self, name: str) -> tuple[Path, Place]:
        if name not in self._places:
            raise CheckpointError(f'{self.label} has no tensor "{name}"')
        return self._places[name]


_READ = Scratch()


def _extent(name: str, place: Place, rows: slice | None) -> tuple[tuple[int, ...], int, int]:
    """Shape of those rows, and the file's bytes that hold them."""
    shape = place.spec.shape
    if rows is None:
        return shape, place.start, place.stop
    if not shape:
        raise CheckpointError(f'"{name}" is a single number and has no rows')
    first, last, step = rows.indices(shape[0])
    if step != 1:
        raise ValueError("rows are read one after another")
    last = max(first, last)
    row_bytes = place.spec.bytes // shape[0] if shape[0] else 0
    return (last - first, *shape[1:]), place.start + first * row_bytes, place.start + last * row_bytes


def _fill(descriptor: int, file: Path, buffer: memoryview, offset: int) -> None:
    done = 0
    while done < len(buffer):
        count = os.preadv(descriptor, [buffer[done : done + (1 << 30)]], offset + done)
        if not count:
            raise CheckpointError(f"{file} ended while it was being read", remedy=CHANGED)
        done += count


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.reshape(-1).view(torch.uint8).numpy().data
