"""cores: which there are for this process."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path
from typing import NamedTuple

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


def _allowed() -> frozenset[int]:
    if sys.platform == "linux":
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))
