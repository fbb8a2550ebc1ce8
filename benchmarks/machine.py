"""What a table must say of where it was made: machine, versions, load."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from benchmarks.measure import MEASUREMENTS, REPOSITORY

_CPU, _MEMORY = Path("/proc/cpuinfo"), Path("/proc/meminfo")
_PACKAGES = ("merging", "torch", "transformers", "safetensors", "numpy")


def machine() -> str:
    """One line: processor, cores, memory, threads."""
    threads = os.environ.get("OMP_NUM_THREADS")
    cores = len(os.sched_getaffinity(0))
    return ", ".join(
        [
            f"{cores} cores of {_field(_CPU, 'model name') or platform.processor()}{_vector_units()}",
            f"{int((_field(_MEMORY, 'MemTotal') or '0').split()[0]) / 2**20:.0f} GiB",
            f"Linux {platform.release()}",
            f"OMP_NUM_THREADS={threads}" if threads else "torch's own number of threads",
        ]
    )


def versions(packages: Iterable[str] = _PACKAGES) -> str:
    """One line: the commit, Python, and the packages of this environment."""
    found = [f"Python {platform.python_version()}"]
    for package in packages:
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            found.append(f"{package} not installed")
    return ", ".join([f"commit {_commit()}", *found])


def peer_versions(python: Path, packages: Iterable[str]) -> str:
    """The same of a peer's environment, asked of its own Python."""
    ask = (
        "import importlib.metadata as m, sys; "
        "print(', '.join(f'{name} {m.version(name)}' for name in sys.argv[1:]))"
    )
    found = subprocess.run([python, "-c", ask, *packages], capture_output=True, text=True, check=False)
    return found.stdout.strip() or "versions unknown"


def load(work: Path) -> str:
    """The load average over all runs; above that of the runs themselves, others were at work."""
    lines = (work / MEASUREMENTS).read_text(encoding="utf-8").splitlines()
    values = [json.loads(line)[name] for line in lines for name in ("load_before", "load_after")]
    return f"load average {min(values):.1f} to {max(values):.1f} over {len(lines)} runs"


def _commit() -> str:
    asked = ["git", "-C", str(REPOSITORY), "describe", "--always", "--dirty"]
    found = subprocess.run(asked, capture_output=True, text=True, check=False)
    return found.stdout.strip() or "unknown"


def _field(file: Path, name: str) -> str:
    lines = file.read_text().splitlines() if file.exists() else []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith(name)), "")


def _vector_units() -> str:
    flags = _field(_CPU, "flags").split()
    units = [name for name, flag in (("AVX-512", "avx512f"), ("AMX", "amx_tile")) if flag in flags]
    return f" ({', '.join(units)})" if units else ""
