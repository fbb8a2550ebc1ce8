"""Room: whether the disk and the memory of this machine are enough for what a run will take."""

from __future__ import annotations

import shutil
from pathlib import Path

from merging.address_space import space_left
from merging.checkpoints.manifest import MANIFEST
from merging.errors import Problem
from merging.preflight import Finding

_MEMINFO = Path("/proc/meminfo")
_CGROUPS = (  # a container's limit: version 2, and 1
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)


def disk_findings(out: Path, *, checkpoint_bytes: int, stages: tuple[str, ...]) -> list[Finding]:
    """A finding where the checkpoints that are still to be written do not fit.

    `stages`: names of those in `out`; one that has a manifest is there already."""
    missing = [stage for stage in stages if not (out / stage / MANIFEST).is_file()]
    needed, free = checkpoint_bytes * len(missing), free_bytes(out)
    if needed <= free:
        return []
    what = f"{' and '.join(missing)} will take {readable(needed)}, its disk has {readable(free)} free"
    remedy = "Make room, or choose an output path on another disk."
    return [Finding("disk", Problem(str(out), what, remedy))]


def memory_findings(peak: float, step: str) -> list[Finding]:
    """A finding where a step needs more memory than the machine has; a warning where others use too much of
    it now. `peak`: bytes, of the whole process; `step` names what needs them."""
    total, available = machine_memory()
    if total is None or available is None or peak <= available:
        return []
    needs = f"needs about {readable(peak)} of memory"
    remedy = 'Set "memory" to what it may use: the run then keeps to it, with smaller batches and blocks.'
    if peak > total:
        return [Finding("memory", Problem(step, f"{needs}, this machine has {readable(total)}", remedy))]
    what = f"{needs}, {readable(available)} of {readable(total)} are free"
    return [Finding("memory", Problem(step, what, f"End other programs, or: {remedy}"), stops=False)]


def free_bytes(path: Path) -> int:
    """On the disk on which the path lies, or will lie."""
    while not path.exists():
        path = path.parent
    return shutil.disk_usage(path).free


def machine_memory() -> tuple[int | None, int | None]:
    """Bytes in all, and free for this process with what it holds already; None where that is not told."""
    from merging.report.stages import resident

    try:
        lines = dict(line.split(":", 1) for line in _MEMINFO.read_text().splitlines())
        total = int(lines["MemTotal"].split()[0]) * 1024
        available = int(lines["MemAvailable"].split()[0]) * 1024 + resident()
    except (OSError, ValueError, KeyError, IndexError):
        return None, None
    for place in _CGROUPS:
        try:
            limit = int(place.read_text())
        except (OSError, ValueError):  # none, or "max"
            continue
        total = min(total, limit)
    if (left := space_left()) is not None:  # of a limit such as `ulimit -v`
        total = min(total, left + resident())
    return total, min(available, total)


def readable(size: float) -> str:
    """`1.5 GB`, in powers of a thousand."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"
