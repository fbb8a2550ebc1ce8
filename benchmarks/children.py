"""Our own modules that import torch, each run in a process of its own: the measuring process stays small."""

from __future__ import annotations

import subprocess
import sys

from benchmarks.measure import REPOSITORY, BenchmarkError


def ask(module: str, *words: str) -> str:
    """What `python -m MODULE WORDS` prints on stdout."""
    command = [sys.executable, "-m", module, *words]
    found = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    if found.returncode:
        raise BenchmarkError(f"{module} failed: {found.stderr.strip()[-600:]}")
    return found.stdout
