"""The command line called in this process: its exit code, stdout and stderr."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from merging_cli.main import main


class Answer(NamedTuple):
    code: int
    out: str
    err: str

    def json(self) -> Any:
        return json.loads(self.out)


@pytest.fixture
def merging_command(capsys: pytest.CaptureFixture[str]) -> Callable[..., Answer]:
    def call(*arguments: object) -> Answer:
        code = main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return Answer(code, captured.out, captured.err)

    return call


@pytest.fixture
def spec_file(tmp_path: Path) -> Path:
    """A spec that fits; nothing it names can be opened."""
    for name in ("base", "a", "b"):
        (tmp_path / "models" / name).mkdir(parents=True)
    path = tmp_path / "spec.json"
    spec = {
        "base": "models/base",
        "experts": {"a": "models/a", "b": "models/b"},
        "merge": {"type": "task_arithmetic", "scale": 0.4},
    }
    path.write_text(json.dumps(spec))
    return path
