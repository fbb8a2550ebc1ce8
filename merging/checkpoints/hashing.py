"""SHA-256 of files, remembered between runs so that large ones are read once."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from merging.cache import cache_folder
from merging.checkpoints.memory import read_memory, save_memory

_BLOCK = 1 << 22
_AT_ONCE = 8  # files; more only compete for the disk
_FRESH = 2.0  # seconds: a file changed so recently could change again without its time stamps moving


class FileHashes:
    """Hashes by content, and a memory of them in a JSON file (default: in the cache folder).

    A remembered hash counts only for the same file with the same size and times of change. Names of blobs in
    the hub's cache are not believed: they too are hashed by what is in them. Several threads may ask.
    """

    def __init__(self, memory: Path | None = None) -> None:
        self._place = memory if memory is not None else cache_folder() / "hashes.json"
        self._known: dict[str, str] = read_memory(self._place, _is_digest)
        self._new: dict[str, str] = {}

    def recalled(self, path: Path) -> str | None:
        """SHA-256 in hex where it is remembered; nothing is read."""
        return self._known.get(_key(path.resolve(), path.stat()))

    def of(self, path: Path, read: Callable[[Path], str] | None = None) -> str:
        """SHA-256 in hex. `read`: who reads the file, where that is asked for, and returns it."""
        file = path.resolve()
        status = file.stat()
        key = _key(file, status)
        if key not in self._known:
            digest = (read or _digest)(file)
            if time.time() - max(status.st_mtime, status.st_ctime) <= _FRESH:
                return digest
            self._known[key] = self._new[key] = digest
        return self._known[key]

    def save(self) -> None:
        """Remember what was hashed; that another process saved meanwhile is kept. A cache that cannot be
        written is no error."""
        if self._new and save_memory(self._place, self._new, _is_digest):
            self._new.clear()


def hashes(paths: Iterable[Path]) -> dict[str, str]:
    """Path -> SHA-256, read anew, several files at a time."""
    files = list(paths)
    with ThreadPoolExecutor(max(1, min(len(files), os.cpu_count() or 1, _AT_ONCE))) as threads:
        return dict(zip(map(str, files), threads.map(_digest, files), strict=True))


def _key(file: Path, status: os.stat_result) -> str:
    return f"{status.st_size}:{status.st_mtime_ns}:{status.st_ctime_ns}:{status.st_ino}:{file}"


def _is_digest(value: object) -> bool:
    return isinstance(value, str)


def _digest(file: Path) -> str:
    digest = hashlib.sha256()
    descriptor = os.open(file, os.O_RDONLY)
    try:
        while block := os.read(descriptor, _BLOCK):
            digest.update(block)
    finally:
        os.close(descriptor)
    return digest.hexdigest()
