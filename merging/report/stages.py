"""Stage: how long a part of a run took, and how much memory the process held at most meanwhile."""

from __future__ import annotations

import resource
import sys
import threading
import time
from pathlib import Path
from types import TracebackType

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_INTERVAL = 0.02


class Stage:
    """A context manager; `seconds` and `peak_bytes` are there afterwards. Stages never nest.

    The peak is the kernel's own high-water mark, set back at the start of the stage. Where that is not
    allowed the memory is sampled, and short peaks are missed; without /proc it is the process's so far.
    """

    def __init__(self, name: str) -> None:
        self.name, self.seconds, self.peak_bytes = name, 0.0, 0

    def __enter__(self) -> Stage:
        self._sampler = None if _reset_peak() else _Sampler()
        self._start = time.perf_counter()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.seconds = time.perf_counter() - self._start
        self.peak_bytes = self._sampler.stop() if self._sampler else _status("VmHWM") or _peak_of_process()


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


def _reset_peak() -> bool:
    """Set the kernel's high-water mark back to the memory in use; False where that cannot be done."""
    try:
        _CLEAR.write_text("5")
    except OSError:
        return False
    return _status("VmHWM") > 0


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
