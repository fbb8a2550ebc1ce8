"""What the C library does with freed memory: kept for the next tensor, or given back to the system."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any


def give_back() -> None:
    """A few milliseconds; for moments at which much was freed. Does nothing where there is no glibc."""
    trim = _function("malloc_trim")
    if trim is not None:
        trim(0)


def share_one_arena() -> None:
    """For a process of our own, before it starts threads: all take memory from one place, where each can use
    what another has freed. Otherwise every thread keeps free memory of its own. Leaves alone what the user
    has set."""
    mallopt = _function("mallopt")
    if mallopt is not None and "MALLOC_ARENA_MAX" not in os.environ and not _tuned():
        mallopt(_ARENA_MAX, 1)


@contextmanager
def reusing() -> Iterator[None]:
    """Freed memory stays with the process until `give_back` or its end, but for very large tensors.

    Otherwise each activation of some megabytes is fetched from the system anew, at several times the cost of
    what is computed in it. Leaves alone what the user has set by MALLOC_... or GLIBC_TUNABLES, and does
    nothing where there is no glibc."""
    mallopt = _function("mallopt")
    own = any(name in os.environ for name in ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_"))
    if mallopt is None or own or _tuned():
        yield
        return
    mallopt(_MMAP_THRESHOLD, _LARGE) or mallopt(_MMAP_THRESHOLD, _LARGEST_OF_OLD)
    mallopt(_TRIM_THRESHOLD, _NEVER)
    try:
        yield
    finally:
        mallopt(_MMAP_THRESHOLD, _LARGEST_OF_OLD)
        mallopt(_TRIM_THRESHOLD, 2 * _LARGEST_OF_OLD)
        give_back()


def _tuned() -> bool:
    return "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", "")


_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8  # of mallopt
_LARGE, _NEVER = 64 << 20, (1 << 31) - 1
_LARGEST_OF_OLD = 32 << 20  # what releases before 2.35 allow; where the library's own adaption ends, too


@cache
def _function(name: str) -> Any:
    return getattr(ctypes.CDLL(None), name, None) if sys.platform == "linux" else None
