"""A folder with small stand-ins for what a spec names, and a spec that fits it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """models/base, models/mnist, models/svhn, data for both, heads; nothing in them is ever opened."""
    for name in ("base", "mnist", "svhn"):
        (tmp_path / "models" / name).mkdir(parents=True)
    for name in ("mnist", "svhn"):
        (tmp_path / "data" / name).mkdir(parents=True)
    (tmp_path / "heads").mkdir()
    (tmp_path / "heads" / "mnist.safetensors").touch()
    return tmp_path


@pytest.fixture
def good() -> dict[str, Any]:
    return {
        "base": "models/base",
        "experts": {"mnist": "models/mnist", "svhn": {"model": "models/svhn", "weight": 1.0}},
        "merge": {"type": "task_arithmetic", "scale": 0.4},
        "calibrate": {"type": "featcal"},
        "tasks": {
            "mnist": {
                "calibration": {"type": "images", "path": "data/mnist", "examples": 256},
                "head": {"type": "linear", "path": "heads/mnist.safetensors"},
            },
            "svhn": {"calibration": {"type": "images", "path": "data/svhn"}},
        },
    }


@pytest.fixture
def write(folder: Path) -> Callable[[object], Path]:
    """Writes a spec, an object as JSON or a text as it is, and returns its path."""

    def write_spec(content: object, name: str = "spec.json") -> Path:
        path = folder / name
        path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
        return path

    return write_spec
