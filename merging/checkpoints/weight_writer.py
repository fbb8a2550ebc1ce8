"""WeightWriter: the weight files of a checkpoint in the making, each byte written once, in any order."""

from __future__ import annotations

import os
import threading
from bisect import insort
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from merging.checkpoints.layout import Layout
from merging.checkpoints.rounding import rounded
from merging.checkpoints.sink import CheckpointSink, refuse_overlap, row_range
from merging.checkpoints.source import CheckpointSource
from merging.errors import CheckpointError

Ranges = Mapping[str, list[tuple[int, int]]]
"""Tensor -> rows (first, one after the last) that were written, in order and joined."""


class WeightWriter:
    """Writes tensors and row blocks to their places, from several threads; nothing is held in memory."""

    def __init__(
        self, like: CheckpointSource, layout: Layout, folder: Path, *, allow_nonfinite: bool = False
    ) -> None:
        """Opens nothing yet. Files that are there are written into, others are made by `create`."""
        self._like, self._layout, self._folder = like, layout, folder
        self._allow_nonfinite = allow_nonfinite
        self._files = {name: file for file, held in layout.places.items() for name in held}
        self._written: dict[str, list[tuple[int, int]]] = {name: [] for name in self._files}
        self._descriptors: dict[str, int] = {}
        self._lock = threading.Lock()

    def create(self) -> None:
        """Make all files, in full length, with their headers."""
        for name, header in self._layout.headers.items():
            self._descriptors[name] = os.open(self._folder / name, os.O_RDWR | os.O_CREAT, 0o666)
            os.ftruncate(self._descriptors[name], self._layout.size(name))
            self._store(name, memoryview(header), 0)

    def join(self) -> None:
        """Write into files that another process made."""
        for name in self._layout.headers:
            self._descriptors[name] = os.open(self._folder / name, os.O_RDWR)

    def write(self, name: str, tensor: Tensor, rows: slice | None) -> None:
        if name not in self._files:
            raise CheckpointError(f'"{name}" is not a tensor of {self._like.label}')
        file = self._files[name]
        place = self._layout.places[file][name]
        first, last = row_range(name, place.spec, tensor, rows)
        data = rounded(tensor.detach(), place.spec.dtype, name=name, allow_nonfinite=self._allow_nonfinite)
        self._claim(name, first, last)
        row_bytes = place.spec.bytes // max(1, place.spec.shape[0] if place.spec.shape else 1)
        flat = data.cpu().contiguous().reshape(-1).view(torch.uint8)
        self._store(file, flat.numpy().data, place.start + first * row_bytes)

    def written(self) -> Ranges:
        return {name: ranges for name, ranges in self._written.items() if ranges}

    def also_written(self, ranges: Ranges) -> None:
        """Rows that another process wrote into the same files."""
        for name, written in ranges.items():
            for first, last in written:
                self._claim(name, first, last)

    def check_complete(self) -> None:
        short = [
            name
            for name, file in self._files.items()
            if self._layout.places[file][name].spec.elements
            and self._written[name] != [(0, (self._like.spec(name).shape or (1,))[0])]
        ]
        if short:
            names = ", ".join(short[:3])
            raise CheckpointError(f"{len(short)} tensors were not written in full; first: {names}")

    def sync(self) -> None:
        """Wait until everything is on the disk."""
        for descriptor in self._descriptors.values():
            os.fsync(descriptor)

    def close(self) -> None:
        while self._descriptors:
            os.close(self._descriptors.popitem()[1])

    def _claim(self, name: str, first: int, last: int) -> None:
        if first == last:
            return
        with self._lock:
            written = self._written[name]
            refuse_overlap(name, first, last, written)
            insort(written, (first, last))
            joined = [written[0]]
            for start, stop in written[1:]:
                if start == joined[-1][1]:
                    joined[-1] = (joined[-1][0], stop)
                else:
                    joined.append((start, stop))
            self._written[name] = joined

    def _store(self, file: str, data: memoryview, offset: int) -> None:
        done = 0
        while done < len(data):
            done += os.pwrite(self._descriptors[file], data[done : done + (1 << 30)], offset + done)


class JoiningSink(CheckpointSink):
    """Writes into a checkpoint that another process makes and publishes."""

    def __init__(self, like: CheckpointSource, layout: Layout, folder: Path) -> None:
        """`folder`: where the files lie that the other process made."""
        self._writer = WeightWriter(like, layout, folder)
        self._writer.join()

    def write(self, name: str, tensor: Tensor, rows: slice | None = None) -> None:
        self._writer.write(name, tensor, rows)

    def written(self) -> Ranges:
        return self._writer.written()

    def close(self) -> None:
        try:
            self._writer.sync()
        finally:
            self._writer.close()

    def abort(self) -> None:
        self._writer.close()


class NoSink(CheckpointSink):
    """Where a process writes whose results another one has, too."""

    def write(self, name: str, tensor: Tensor, rows: slice | None = None) -> None:
        pass

    def close(self) -> None:
        pass

    def abort(self) -> None:
        pass
