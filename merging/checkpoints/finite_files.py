"""FiniteFiles: which tensors of a weight file hold NaN or infinity, found while the file is hashed, and
remembered."""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from merging import native
from merging.cache import cache_folder
from merging.checkpoints.hashing import FileHashes
from merging.checkpoints.header import CHANGED, Header, read_header
from merging.checkpoints.memory import read_memory, save_memory
from merging.checkpoints.scratch import Scratch
from merging.checkpoints.torch_bin import TorchBinSource
from merging.errors import CheckpointError

WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt")
"""How files end that hold weights."""

_BLOCK = 1 << 20  # bytes read at a time; of whole entries, whatever their width
_PATTERNS = {  # width of an entry, and the bits that are all ones where it is infinite or no number
    torch.float8_e5m2: (1, 0x7C),
    torch.float8_e4m3fn: (1, 0x7F),
    torch.float16: (2, 0x7C00),
    torch.bfloat16: (2, 0x7F80),
    torch.float32: (4, 0x7F800000),
    torch.complex64: (4, 0x7F800000),
    torch.float64: (8, 0x7FF0000000000000),
}
_INTEGERS = {1: np.int8, 2: np.int16, 4: np.int32, 8: np.int64}
_READ = Scratch()

Counts = Mapping[str, int]
"""Stored name -> how many values are NaN or infinite, of the tensors that have any."""


class FiniteFiles:
    """Counts by what is in a file, and a memory of them in a JSON file (default: in the cache folder).

    A safetensors file that is new is read once, for its hash and its counts together. Several threads may
    ask.
    """

    def __init__(self, hashes: FileHashes, memory: Path | None = None) -> None:
        self._hashes = hashes
        self._place = memory if memory is not None else cache_folder() / "not-finite.json"
        self._known: dict[str, Counts] = read_memory(self._place, _are_counts)  # by the file's SHA-256
        self._new: dict[str, Counts] = {}

    def recalled(self, path: Path) -> Counts | None:
        """What is known of the file without reading it."""
        digest = self._hashes.recalled(path)
        return None if digest is None else self._known.get(digest)

    def of(self, path: Path) -> Counts:
        """Raises CheckpointError for a file that is no checkpoint."""
        seen: list[Counts] = []

        def read(file: Path) -> str:
            digest, counts = _hashed_and_counted(file)
            seen.append(counts)
            return digest

        together = path.suffix == ".safetensors"
        digest = self._hashes.of(path, read if together else None)
        if seen or digest not in self._known:
            counts = seen[0] if seen else _hashed_and_counted(path)[1] if together else _pickled(path)
            self._known[digest] = self._new[digest] = counts
        return self._known[digest]

    def save(self) -> None:
        """Remember what was found, and the hashes. A cache that cannot be written is no error."""
        self._hashes.save()
        if self._new and save_memory(self._place, self._new, _are_counts):
            self._new.clear()


def not_finite(data: Tensor, dtype: torch.dtype) -> int:
    """How many values are NaN or infinite in raw bytes of that dtype; 0 for those that cannot be."""
    if dtype not in _PATTERNS or not data.numel():
        return 0
    width, ones = _PATTERNS[dtype]
    count = native.not_finite(data, width=width, ones=ones)
    if count is None:
        entries = data.numpy().view(_INTEGERS[width])
        count = int(np.count_nonzero((entries & entries.dtype.type(ones)) == ones))
    return count


def _hashed_and_counted(file: Path) -> tuple[str, Counts]:
    """A safetensors file's SHA-256 and counts, from one reading."""
    header, digest, counts = read_header(file), hashlib.sha256(), Counter[str]()
    descriptor = os.open(file, os.O_RDONLY)
    try:
        for start, stop, name in _parts(header):
            block = _READ.bytes(stop - start)
            if os.preadv(descriptor, [block.numpy().data], start) != stop - start:
                raise CheckpointError(f"{file} was changed while it was being used", remedy=CHANGED)
            digest.update(block.numpy().data)
            if name is not None:
                counts[name] += not_finite(block, header.tensors[name].spec.dtype)
    finally:
        os.close(descriptor)
    return digest.hexdigest(), +counts


def _parts(header: Header) -> Iterator[tuple[int, int, str | None]]:
    """The whole file in blocks: from where, up to where, and of which tensor; the header is of none, and
    nothing lies between or after tensors."""
    places = [(place.start, place.stop, name) for name, place in header.tensors.items()]
    for first, last, name in [(0, places[0][0] if places else header.size, None), *places]:
        for start in range(first, last, _BLOCK):
            yield start, min(last, start + _BLOCK), name


def _pickled(file: Path) -> Counts:
    source, counts = TorchBinSource(file), Counter[str]()
    for name in source.names():
        tensor = source.read(name)
        if tensor.dtype in _PATTERNS:
            counts[name] += not_finite(tensor.contiguous().reshape(-1).view(torch.uint8), tensor.dtype)
    return +counts


def _are_counts(value: object) -> bool:
    return isinstance(value, dict) and all(type(count) is int and count > 0 for count in value.values())
