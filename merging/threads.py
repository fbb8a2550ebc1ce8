"""in_threads: one action over many items, on as many threads as torch may use and the sources allow."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

import torch

if TYPE_CHECKING:
    from merging.checkpoints.source import CheckpointSource

Item = TypeVar("Item")
Result = TypeVar("Result")


def threads_over(sources: Iterable[CheckpointSource]) -> int:
    """Those that torch may use, where all of the sources can be read by several at a time; else 1."""
    return torch.get_num_threads() if all(source.concurrent for source in sources) else 1


def in_threads(action: Callable[[Item], Result], items: Iterable[Item], threads: int) -> Iterator[Result]:
    """The results in the order of the items. With several threads, torch computes on one in each of them.

    The first exception ends it: what has begun is finished, nothing more is begun, and it is raised.
    """
    if threads <= 1:
        yield from map(action, items)
        return
    before = torch.get_num_threads()
    executor = ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,))
    try:
        yield from executor.map(action, items)
    finally:
        executor.shutdown(cancel_futures=True)
        torch.set_num_threads(before)  # torch keeps one number for all threads beside each thread's own
