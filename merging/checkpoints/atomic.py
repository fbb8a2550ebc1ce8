"""Small files that are there whole or as they were before, also after a crash."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from merging.errors import OutputError


def write_atomic(path: Path, text: str, *, scratch: Path | None = None) -> None:
    """Write to a temporary file in `scratch` (else beside it), wait until that is on the disk, rename.

    A killed process leaves the temporary file: in a folder of results, `scratch` is one that is tidied up."""
    temporary = (scratch or path.parent) / f".{path.name}.{secrets.token_hex(4)}.tmp"
    try:
        with temporary.open("x", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if not isinstance(error, OSError):
            raise
        raise OutputError(f"{path} cannot be written: {error.strerror or error}") from error
    sync(path.parent)


def sync(path: Path) -> None:
    """Wait until the file or folder is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
