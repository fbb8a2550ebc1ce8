"""Our own modules that import torch, each run in a process of its own: the measuring process stays small."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping

from benchmarks.measure import REPOSITORY, BenchmarkError


def ask(module: str, *words: str, environment: Mapping[str, str] | None = None) -> str:
    """What `python -m MODULE WORDS` prints on stdout. `environment`: on top of this process' own."""
    command, env = [sys.executable, "-m", module, *words], {**os.environ, **(environment or {})}
    found = subprocess.run(command, cwd=REPOSITORY, env=env, capture_output=True, text=True, check=False)
    if found.returncode:
        raise BenchmarkError(f"{module} failed: {(found.stderr or found.stdout).strip()[-600:]}")
    return found.stdout
