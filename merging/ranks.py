"""Ranks: the processes of one run, as torchrun starts them; a run without torchrun is the only one."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import Tensor

from merging.connecting import connect, processes, share_cores
from merging.cores import Place
from merging.errors import MergingError

Item = TypeVar("Item")
_PATIENCE = timedelta(days=7)  # a rank may have to wait for as long as another computes


class Ranks:
    """Which process of how many this is, and what they tell each other. All must make the same calls."""

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.rank, self.size = rank, size

    @property
    def first(self) -> bool:
        return self.rank == 0

    def mine(self, items: Sequence[Item], costs: Sequence[float] | None = None) -> list[Item]:
        """This rank's share; with `costs` the dearest are dealt out first, each to whoever has the least."""
        if self.size == 1:
            return list(items)
        prices = [1.0] * len(items) if costs is None else costs
        loads, owners = [0.0] * self.size, [0] * len(items)
        for place in sorted(range(len(items)), key=lambda i: (-prices[i], i)):
            owners[place] = min(range(self.size), key=lambda rank: (loads[rank], rank))
            loads[owners[place]] += prices[place]
        return [item for item, owner in zip(items, owners, strict=True) if owner == self.rank]

    def share_of(self, count: int) -> range:
        """This rank's part of so many examples, one after another."""
        return range(count * self.rank // self.size, count * (self.rank + 1) // self.size)

    def owner(self, place: int) -> int:
        """The rank that solves the place-th of several systems."""
        return place % self.size

    def total_(self, tensor: Tensor, to: int | None = None) -> Tensor:
        """The sum over all ranks, in place; with `to`, that rank alone has it."""
        if self.size > 1:
            with _blamed():
                if to is None:
                    torch.distributed.all_reduce(tensor)
                else:
                    torch.distributed.reduce(tensor, to)
        return tensor

    def from_rank(self, tensor: Tensor, source: int) -> Tensor:
        """`source`'s values, in place."""
        if self.size > 1:
            with _blamed():
                torch.distributed.broadcast(tensor, source)
        return tensor

    def tell(self, value: Any, source: int = 0) -> Any:
        """What `source` gave, on every rank. For small things that can be pickled."""
        if self.size == 1:
            return value
        held = [value if self.rank == source else None]
        with _blamed():
            torch.distributed.broadcast_object_list(held, source)
        return held[0]

    def gather(self, value: Any) -> list[Any]:
        """What each rank gave, in their order. For small things that can be pickled."""
        if self.size == 1:
            return [value]
        held: list[Any] = [None] * self.size
        with _blamed():
            torch.distributed.all_gather_object(held, value)
        return held


ALONE = Ranks()


def ranks() -> Ranks:
    """The processes of this run; they are connected at the first call. gloo, or nccl where there are GPUs.

    Raises SpecError where the environment cannot be one of several processes, MergingError where some of them
    do not come (`connecting.py`)."""
    size = processes()
    if size < 2:
        return ALONE
    if not torch.distributed.is_initialized():
        local = int(os.environ.get("LOCAL_RANK", "0"))
        if torch.cuda.is_available():
            torch.cuda.set_device(local)
        backend = "cuda:nccl,cpu:gloo" if torch.cuda.is_available() else "gloo"
        connect(backend, _PATIENCE)
        mine = Place.here()
        share_cores(mine, Ranks(torch.distributed.get_rank(), size).gather(mine))
    return Ranks(torch.distributed.get_rank(), size)


@contextmanager
def _blamed() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise MergingError(
            f"another process of this run ended or cannot be reached: {str(error).splitlines()[0]}",
            remedy="Look at its messages; then start the run again, which goes on where it was.",
        ) from error
