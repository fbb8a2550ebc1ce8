"""cores: which there are for this process, and how several processes share them."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

_BOOT = Path("/proc/sys/kernel/random/boot_id")  # tells machines of the same name apart


class Place(NamedTuple):
    """A machine, and the cores on it that a process may use."""

    machine: str
    cores: frozenset[int]

    @classmethod
    def here(cls) -> Place:
        boot = _BOOT.read_text().strip() if _BOOT.is_file() else ""
        return cls(f"{socket.gethostname()} {boot}", _allowed())


def cores() -> int:
    """Cores that this process may use."""
    return len(_allowed())


def share_cores(mine: Place, everyone: Sequence[Place]) -> None:
    """Let this process have no more threads than there are cores for it, beside others on the same ones: the
    threads of all would wait for each other at every operation, whatever OMP_NUM_THREADS says. Processes that
    were bound to cores of their own keep all of these."""
    sharing = sum(one.machine == mine.machine and bool(one.cores & mine.cores) for one in everyone)
    most = max(1, len(mine.cores) // max(1, sharing))
    if sharing > 1 and torch.get_num_threads() > most:
        torch.set_num_threads(most)


def _allowed() -> frozenset[int]:
    if sys.platform == "linux":
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))
