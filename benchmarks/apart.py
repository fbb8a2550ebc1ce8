"""The largest difference between two checkpoints, relative to each tensor's largest entry.

`python -m benchmarks.apart ONE OTHER` prints JSON. Imports torch, so `two_processes` runs it
as a process of its own.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from safetensors import safe_open
from torch import Tensor


def apart(one: Path, other: Path) -> dict[str, float | str]:
    theirs = dict(tensors(other))
    largest, where = 0.0, ""
    for name, mine in tensors(one):
        found = float((mine - theirs.pop(name)).abs().max()) / max(float(mine.abs().max()), 1e-12)
        if found > largest:
            largest, where = found, name
    if theirs:
        raise SystemExit(f"only in {other}: {', '.join(theirs)}")
    return {"largest": largest, "tensor": where}


def tensors(folder: Path) -> Iterator[tuple[str, Tensor]]:
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118  (it is no mapping)
                yield name, opened.get_tensor(name).double()


def main(words: Sequence[str]) -> None:
    print(json.dumps(apart(Path(words[0]), Path(words[1]))))


if __name__ == "__main__":
    main(sys.argv[1:])
