"""Which build of a suite a folder of records belongs to: numbers of two builds are never one table."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from benchmarks.suites.grid import Suite
from merging.checkpoints.hashing import hashes
from merging.data.task import Task
from merging.errors import OutputError

_NAME = "suite.json"


def identity(suite: Suite) -> dict[str, str]:
    """Role of a model or name of a task -> a hash of its files, or of its examples and its head."""
    inputs = suite.opened.inputs
    files = {
        role: [file for file in one.files if file.suffix == ".safetensors"] for role, one in inputs.items()
    }
    digests = hashes(file for of_role in files.values() for file in of_role)
    models = {role: _together(*(digests[str(file)] for file in of_role)) for role, of_role in files.items()}
    return models | {f"task {name}": _of_task(task) for name, task in suite.tasks.items()}


def claim(measured: Path, suite: Suite) -> None:
    """Mark the folder as this build's. Raises OutputError where it is another's."""
    found, file = identity(suite), measured / _NAME
    if not file.exists():
        file.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
        return
    known = json.loads(file.read_text(encoding="utf-8"))
    differing = sorted(name for name in known.keys() | found.keys() if known.get(name) != found.get(name))
    if differing:
        raise OutputError(
            f"{measured} has what was measured on another build of the suite: {', '.join(differing)} differ",
            remedy="Choose another --out, or measure on that build.",
        )


def _of_task(task: Task) -> str:
    parts = [part.fingerprint for part in (task.calibration, task.validation, task.test) if part is not None]
    return _together(*parts, *([] if task.head is None else [task.head.fingerprint]))


def _together(*digests: str) -> str:
    return hashlib.sha256("\0".join(digests).encode()).hexdigest()[:16]
