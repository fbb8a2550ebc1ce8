"""probe: what this machine does in a second, found out in about half of one."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from merging.costs.cost import Work

_EACH = 0.08  # seconds for each rate
_LEAST = 6  # times, however long they take
_FILE = 16 << 20  # bytes written at a time


@dataclass(frozen=True)
class Rates:
    """Per second; see Work for what is counted."""

    single: float
    double: float
    entries: float
    read: float
    written: float

    def seconds(self, work: Work) -> float:
        """Reading overlaps with nothing here, so that this is rather too much than too little."""
        return (
            work.single / self.single
            + work.double / self.double
            + work.entries / self.entries
            + work.read / self.read
            + work.written / self.written
        )


def probe(folder: Path) -> Rates:
    """Rates of products (on all threads), of entry-wise work and of the disk that `folder` will lie on."""
    read, written = _disk(folder)
    return Rates(
        single=_products(torch.float32),
        double=_products(torch.float64),
        entries=_entries(),
        read=read,
        written=written,
    )


def _products(dtype: torch.dtype) -> float:
    left, right = torch.ones(512, 768, dtype=dtype), torch.ones(768, 768, dtype=dtype)
    return 2 * 512 * 768 * 768 * _times(lambda: left @ right)


def _entries() -> float:
    """One entry through one operation on one thread, in a block that stays in the cache."""
    one, other = torch.ones(1 << 17, dtype=torch.float64), torch.ones(1 << 17, dtype=torch.float64)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return (1 << 17) * _times(lambda: one.add_(other))
    finally:
        torch.set_num_threads(threads)


def _times(action: Callable[[], object]) -> float:
    """How often in a second, by the fastest: at other times others were at work here."""
    action()
    took: list[float] = []
    start = time.perf_counter()
    while time.perf_counter() - start < _EACH or len(took) < _LEAST:
        begun = time.perf_counter()
        action()
        took.append(time.perf_counter() - begun)
    return 1.0 / min(took)


def _disk(folder: Path) -> tuple[float, float]:
    """Bytes read (of what was just written: from memory) and written per second; the file has no name."""
    place = next(part for part in (folder, *folder.parents) if part.is_dir())
    content = os.urandom(1 << 20) * (_FILE >> 20)
    try:
        with tempfile.TemporaryFile(dir=place, buffering=0) as file:
            start, written = time.perf_counter(), 0
            while written < 1 << 28 and time.perf_counter() - start < _EACH:
                file.write(content)
                written += len(content)
            os.fsync(file.fileno())
            write_seconds = time.perf_counter() - start
            file.seek(0)
            buffer, count = bytearray(_FILE), 0
            start = time.perf_counter()
            while read := file.readinto(buffer):
                count += read
            return count / (time.perf_counter() - start), written / write_seconds
    except OSError:  # a full or read-only disk is told by whoever writes the result
        return 1e9, 1e9
