"""Rates of this machine, measured now: `python -m benchmarks.rates [--toy]` prints them as JSON.

Imports torch, so the tables run it as a process of its own."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence

import torch

SIZE, REPEATS = 3072, 5
_SHAPES = (
    (SIZE, SIZE, SIZE),
    (3200, 768, 3072),
    (768, 3200, 768),
)  # rows, inner, columns: large, forward, Gram


def rates(
    *, toy: bool = False, kinds: Sequence[str] = ("float32", "bfloat16"), repeats: int = REPEATS
) -> dict[str, float]:
    """Operations a second of the best product of matrices; the least seconds of several runs count."""
    shapes = ((64, 64, 64),) if toy else _SHAPES
    found = {kind: max(_rate(shape, getattr(torch, kind), repeats) for shape in shapes) for kind in kinds}
    return {**found, "threads": float(torch.get_num_threads())}


def _rate(shape: tuple[int, int, int], dtype: torch.dtype, repeats: int) -> float:
    rows, inner, columns = shape
    left, right = torch.randn(rows, inner).to(dtype), torch.randn(inner, columns).to(dtype)
    result = torch.empty(rows, columns, dtype=dtype)
    return 2.0 * rows * inner * columns / least(lambda: torch.mm(left, right, out=result), repeats)


def least(action: Callable[[], object], repeats: int = REPEATS) -> float:
    """Seconds of the fastest of several runs, after one that is not counted."""
    action()
    found = []
    for _ in range(repeats):
        start = time.perf_counter()
        action()
        found.append(time.perf_counter() - start)
    return min(found)


def main(words: Sequence[str]) -> None:
    print(json.dumps(rates(toy="--toy" in words)))


if __name__ == "__main__":
    main(sys.argv[1:])
