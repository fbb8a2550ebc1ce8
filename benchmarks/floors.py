"""Floors: the least that anyone needs.

`python -m benchmarks.floors OUT BYTES FILE...` is the floor of a merge: it reads every byte of the files,
writes so many bytes, and imports torch once; nothing else."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.measure import Contender

_BUFFER = 8 << 20


def read_and_write(files: Sequence[Path], out: Path, size: int) -> None:
    """Through one buffer, over and over."""
    buffer = memoryview(bytearray(_BUFFER))
    for file in files:
        with file.open("rb", buffering=0) as stream:
            while stream.readinto(buffer):
                pass
    out.mkdir(parents=True)
    with (out / "floor").open("wb", buffering=0) as stream:
        for start in range(0, size, _BUFFER):
            stream.write(buffer[: min(_BUFFER, size - start)])


def disk_floor(models: Sequence[Path], like: Path, out: Path) -> Contender:
    """Read these models, write one as large as `like`, import torch."""
    files = [file for model in models for file in weight_files(model)]
    size = sum(file.stat().st_size for file in weight_files(like))
    command = (sys.executable, "-m", "benchmarks.floors", str(out), str(size), *map(str, files))
    return Contender("read + write + import torch", command, fresh=(out,))


def weight_files(model: Path) -> list[Path]:
    return sorted(model.glob("*.safetensors"))


def main(words: Sequence[str]) -> None:
    read_and_write([Path(word) for word in words[2:]], Path(words[0]), int(words[1]))
    import torch  # noqa: F401


if __name__ == "__main__":
    main(sys.argv[1:])
