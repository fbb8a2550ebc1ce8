"""Stage: how long a part of a run took, and how much memory the process held at most meanwhile."""

from __future__ import annotations

import resource
import sys
import threading
import time
from pathlib import Path
from types import TracebackType

_STATUS = Path("/proc/self/status")
_INTERVAL = 0.02


class Stage:
    """A context manager; `seconds` and `peak_bytes` are there afterwards. Stages never nest.

    The peak is the kernel's own high-water mark where the process never held more before; else the memory is
    sampled, and short peaks are missed. Without /proc it is the process's so far. The mark is left alone: who
    measures the process from outside reads it, too.
    """

    def __init__(self, name: str) -> None:
        self.name, self.seconds, self.peak_bytes = name, 0.0, 0

    def __enter__(self) -> Stage:
        self._before = _status("VmHWM")
        self._sampler = _Sampler()
        self._start = time.perf_counter()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.seconds = time.perf_counter() - self._start
        sampled, highest = self._sampler.stop(), _status("VmHWM")
        self.peak_bytes = highest if highest > self._before else sampled


class _Sampler(threading.Thread):
    """Looks at the memory in use every few milliseconds."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._stopped, self._peak = threading.Event(), 0
        self.start()

    def run(self) -> None:
        while True:
            self._peak = max(self._peak, _status("VmRSS"))
            if self._stopped.wait(_INTERVAL):
                return

    def stop(self) -> int:
        self._stopped.set()
        self.join()
        return max(self._peak, _status("VmRSS")) or _peak_of_process()


def resident() -> int:
    """Bytes of memory that the process holds now."""
    return _status("VmRSS") or _peak_of_process()


def _status(field: str) -> int:
    """Bytes that /proc reports under this name; 0 where there is no /proc."""
    try:
        lines = _STATUS.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:")), 0)


def _peak_of_process() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
