"""Which build of a suite a folder of records belongs to: numbers of two builds are never one table."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path

from benchmarks.suites.grid import Suite
from merging.checkpoints.hashing import hashes
from merging.data.task import Task
from merging.errors import OutputError

FILE = "suite.json"
_WEIGHTS = (".safetensors", ".bin")
_SCALES = ("r", "lora_alpha", "use_rslora", "use_dora", "rank_pattern", "alpha_pattern")  # of an adapter


def identity(suite: Suite, joint: Path | None = None) -> dict[str, str]:
    """Role of a model or name of a task -> a hash of its weights, or of its examples and its head."""
    models = {role: one.files for role, one in suite.opened.inputs.items()}
    if joint is not None:
        models["joint model"] = tuple(joint.iterdir())
    found = {role: _of_model(files) for role, files in models.items()}
    return found | {f"task {name}": _of_task(task) for name, task in suite.tasks.items()}


def claim(measured: Path, suite: Suite, joint: Path | None = None) -> None:
    """Mark the folder as this build's. Raises OutputError where it is another's, or nobody knows whose."""
    found, file, records = identity(suite, joint), measured / FILE, measured / "records.jsonl"
    if not file.exists():
        if records.exists() and records.stat().st_size:
            raise OutputError(
                f"{measured} has records, and no {FILE} that says of which build",
                remedy="Choose another --out.",
            )
        making = file.with_suffix(".part")
        making.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
        os.replace(making, file)
        return
    known = json.loads(file.read_text(encoding="utf-8"))
    differing = sorted(name for name in known.keys() | found.keys() if known.get(name) != found.get(name))
    if differing:
        raise OutputError(
            f"{measured} has what was measured on another build of the suite: {', '.join(differing)} differ",
            remedy="Choose another --out, or measure on that build.",
        )


def _of_model(files: Iterable[Path]) -> str:
    ordered = sorted(files)
    weights = [file for file in ordered if file.suffix in _WEIGHTS]
    if not weights:
        raise OutputError(f"no weights among {', '.join(map(str, ordered))}")
    digests = hashes(weights)
    configs = [json.loads(file.read_bytes()) for file in ordered if file.name == "adapter_config.json"]
    scales = [json.dumps([config.get(name) for name in _SCALES]) for config in configs]
    return _together(*(digests[str(file)] for file in weights), *scales)


def _of_task(task: Task) -> str:
    parts = [part.fingerprint for part in (task.calibration, task.validation, task.test) if part is not None]
    return _together(*parts, *([] if task.head is None else [task.head.fingerprint]))


def _together(*digests: str) -> str:
    return hashlib.sha256("\0".join(digests).encode()).hexdigest()[:16]
