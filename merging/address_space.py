"""address_space: a limit on it (`ulimit -v`) under which libraries cannot be loaded is told before they are.

What they do there otherwise is their own: some raise, some end the process, some never return.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

from merging.errors import MergingError

_AMPLE = 16 << 30  # bytes; with so many the libraries can be loaded, whichever build of torch it is
_SPARE = 256 << 20  # bytes that have to be left for what a command does
_NEARLY = 128 << 20  # bytes; with so few left, whatever failed, failed for want of them
_PATIENCE = 180  # seconds, on a cold disk; of the processor it may take fewer:
_PROCESSOR = 40
_STATUS = Path("/proc/self/status")

_TRIAL = """
import resource
resource.setrlimit(resource.RLIMIT_AS, ({limit}, {limit}))
resource.setrlimit(resource.RLIMIT_CPU, ({processor}, {processor}))
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
import torch, transformers.modeling_utils, transformers.processing_utils
torch.ones(1 << 16).sum()
"""


def limit_of_space() -> int | None:
    """Bytes of address space that this process may have; None where there is no limit."""
    try:
        import resource
    except ImportError:  # not on Windows
        return None
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    return None if limit in (resource.RLIM_INFINITY, -1) else limit


def space_left() -> int | None:
    """Bytes of it that are not taken yet; None where there is no limit, or where it is not told."""
    return _left("VmSize")


def space_ran_out() -> bool:
    """Whether this process has had nearly all the address space that it may have."""
    left = _left("VmPeak")
    return left is not None and left < _NEARLY


def refuse_too_little_space() -> None:
    """Have torch tried out in a process of its own, the first time that it is wanted, where the limit is low.

    For the command line: `import torch` then raises MergingError where it could not be used."""
    limit = limit_of_space()
    if limit is not None and limit < _AMPLE and "torch" not in sys.modules:
        sys.meta_path.insert(0, _Trial())


def told_limit() -> str:
    """`this process may have no more than 2.0 GiB of address space`, or nothing."""
    limit = limit_of_space()
    if limit is None:
        return ""
    return f"this process may have no more than {limit / (1 << 30):.1f} GiB of address space"


class _Trial:
    """A finder of modules that finds none: asked for torch, it looks whether that can be loaded."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name == "torch":
            sys.meta_path.remove(self)
            _try()
        return None


def _try() -> None:
    limit = max((limit_of_space() or 0) - _SPARE, 1)
    trial = _TRIAL.format(limit=limit, processor=_PROCESSOR)
    try:
        ended = subprocess.run(
            [sys.executable, "-c", trial],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=_PATIENCE,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        code = 1
    else:
        code = ended.returncode
    if code:
        raise MergingError(
            f"out of memory: {told_limit()}, too little to load torch and transformers",
            remedy="Allow more (`ulimit -v unlimited`, or what your batch system calls virtual memory). What "
            'runs out on a machine is resident memory: bound that, with "memory" in the spec.',
        )


def _left(field: str) -> int | None:
    limit = limit_of_space()
    if limit is None:
        return None
    try:
        lines = dict(line.split(":", 1) for line in _STATUS.read_text().splitlines())
        return max(limit - int(lines[field].split()[0]) * 1024, 0)
    except (OSError, ValueError, KeyError, IndexError):
        return None
