"""Freed memory is used again inside `reusing`, and settings of the user's are left alone."""

from __future__ import annotations

import os
import resource
import subprocess
import sys

import pytest

_FAULTS = """
import contextlib, resource, sys
import torch
from merging.allocator import reusing
torch.set_num_threads(1)
with reusing() if sys.argv[1] == "reusing" else contextlib.nullcontext():
    for count in range(30):
        if count == 10:
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        kept = [torch.ones(40 << 18) for _ in range(3)]  # 40 MiB each: always new memory otherwise
        del kept
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""

_pages = 20 * 3 * (40 << 20) // resource.getpagesize()


def _faults(how: str, **environment: str) -> int:
    run = subprocess.run(
        [sys.executable, "-c", _FAULTS, how],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    return int(run.stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="mallopt is glibc's")
def test_memory_is_fetched_once() -> None:
    if _faults("plain") < _pages // 4:
        pytest.skip("this C library or kernel hands out large blocks without a fault per page")
    assert _faults("reusing") < _pages // 20


@pytest.mark.skipif(sys.platform != "linux", reason="mallopt is glibc's")
def test_the_user_s_own_thresholds_stay() -> None:
    own = {"MALLOC_MMAP_THRESHOLD_": "65536"}
    assert abs(_faults("reusing", **own) - _faults("plain", **own)) < _pages // 10


_ARENAS = """
import ctypes, re, threading
from merging.allocator import share_one_arena
share_one_arena()
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
places = []
threads = [threading.Thread(target=lambda: places.append(libc.malloc(1000))) for _ in range(4)]
for thread in threads:
    thread.start()
    thread.join()
heap = next(line for line in open("/proc/self/maps") if line.rstrip().endswith("[heap]"))
start, stop = (int(part, 16) for part in re.match("([0-9a-f]+)-([0-9a-f]+)", heap).groups())
print(all(start <= place < stop for place in places))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="mallopt is glibc's")
@pytest.mark.parametrize(("environment", "one"), [({}, True), ({"MALLOC_ARENA_MAX": "8"}, False)])
def test_threads_share_one_arena_unless_the_user_says_otherwise(
    environment: dict[str, str], one: bool
) -> None:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    run = subprocess.run(
        [sys.executable, "-c", _ARENAS],
        env={**clean, **environment},
        capture_output=True,
        text=True,
        check=True,
    )

    assert run.stdout.strip() == str(one)
