"""Opening safetensors files of examples and heads, with errors for everything else that people hand over."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from merging.errors import DataError


@contextmanager
def open_tensor_file(path: Path, where: str) -> Iterator[Any]:
    """A safetensors file, opened but not read. `where` starts the error: 'task "mnist": test data'."""
    from safetensors import SafetensorError, safe_open

    if not path.is_file():
        kind = "is a folder, expected a safetensors file" if path.is_dir() else "does not exist"
        raise DataError(f"{where}: {path} {kind}")
    with path.open("rb") as file:
        start = file.read(4)
    if start[:2] in (b"PK", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05"):
        raise DataError(
            f"{where}: {path} is a pickle or archive (.pt, .bin, .npz), which can run code when it is opened",
            remedy="Convert it: safetensors.torch.save_file({name: tensor, ...}, path).",
        )
    try:
        opened = safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise DataError(f"{where}: {path} is not a whole safetensors file ({error})") from error
    with opened as tensors:
        yield tensors
