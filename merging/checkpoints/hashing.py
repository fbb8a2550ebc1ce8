"""SHA-256 of files, remembered so that large ones are read once."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable, MutableMapping
from pathlib import Path

_BLOCK = 1 << 22
_FRESH = 2.0  # seconds: a file changed so recently could change again without its time stamp moving


def sha256(path: Path, cache: MutableMapping[str, str] | None = None) -> str:
    """Hash of the file's content, in hex. `cache`, kept by the caller and fit for JSON, is asked first.

    An entry counts only for the same file with the same size and time of change. Names of blobs in the
    hub's cache are not believed: they too are hashed by what is in them.
    """
    file = path.resolve()
    status = file.stat()
    key = f"{status.st_size}:{status.st_mtime_ns}:{file}"
    if cache is not None and key in cache:
        return cache[key]
    digest = hashlib.sha256()
    with file.open("rb", buffering=0) as stream:
        while block := stream.read(_BLOCK):
            digest.update(block)
    if cache is not None and time.time() - status.st_mtime > _FRESH:
        cache[key] = digest.hexdigest()
    return digest.hexdigest()


def hashes(paths: Iterable[Path], cache: MutableMapping[str, str] | None = None) -> dict[str, str]:
    """Path -> SHA-256, for what a manifest says of its inputs."""
    return {str(path): sha256(path, cache) for path in paths}
