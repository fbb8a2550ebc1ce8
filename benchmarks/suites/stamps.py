"""Which commands measured what lies in a folder of records, on what machine, by which versions."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.machine import machine, versions

_NAME = "commands.jsonl"
_PATHS = ("suites", "measured")  # where a reader has them


class Stamp(NamedTuple):
    command: str
    machine: str
    versions: str


def stamp(measured: Path, arguments: Sequence[str]) -> None:
    """Add this command to the folder's."""
    words = [_for_readers(word) for word in arguments]
    found = Stamp(f"python -m benchmarks.suites {shlex.join(words)}", machine(), versions())
    with (measured / _NAME).open("a", encoding="utf-8") as file:
        file.write(json.dumps(found._asdict()) + "\n")


def stamps(measured: Path) -> list[Stamp]:
    """Those of the folder, each command once, with the latest facts."""
    lines = (measured / _NAME).read_text(encoding="utf-8").splitlines()
    found = [Stamp(**json.loads(line)) for line in lines]
    return list({one.command: one for one in found}.values())


def _for_readers(word: str) -> str:
    """A path from its "suites" or "measured" on: what lies before is this machine's own business."""
    parts = Path(word).parts
    inside = next((index for index, part in enumerate(parts) if part in _PATHS), None)
    return word if inside is None or not os.path.isabs(word) else str(Path(*parts[inside:]))
