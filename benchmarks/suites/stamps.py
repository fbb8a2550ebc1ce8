"""Which commands measured what lies in a folder of records, on what machine, by which versions."""

from __future__ import annotations

import json
import os
import shlex
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from benchmarks.machine import machine, versions

_NAME = "commands.jsonl"
_PATHS = ("suites", "measured")  # where a reader has them


class Stamp(NamedTuple):
    command: str
    machine: str
    versions: str
    seconds: float = 0.0
    """Of all calls together, also those that were stopped by an error."""

    @property
    def told(self) -> str:
        """The command, and how long it took."""
        return f"{self.command}  # {self.seconds / 60:.0f} min" if self.seconds else self.command


@contextmanager
def stamped(measured: Path, arguments: Sequence[str]) -> Iterator[None]:
    """Add this command to the folder's, and its seconds once it is over."""
    words = [_for_readers(word) for word in arguments]
    begun = Stamp(f"python -m benchmarks.suites {shlex.join(words)}", machine(), versions())
    _add(measured, begun)
    start = time.monotonic()
    try:
        yield
    finally:
        _add(measured, begun._replace(seconds=round(time.monotonic() - start, 1)))


def stamps(measured: Path) -> list[Stamp]:
    """Those of the folder, each command once, with the latest facts."""
    lines = (measured / _NAME).read_text(encoding="utf-8").splitlines()
    found: dict[str, Stamp] = {}
    for one in (Stamp(**json.loads(line)) for line in lines):
        before = found[one.command].seconds if one.command in found else 0.0
        found[one.command] = one._replace(seconds=before + one.seconds)
    return list(found.values())


def _add(measured: Path, one: Stamp) -> None:
    with (measured / _NAME).open("a", encoding="utf-8") as file:
        file.write(json.dumps(one._asdict()) + "\n")


def _for_readers(word: str) -> str:
    """A path from its "suites" or "measured" on: what lies before is this machine's own business."""
    parts = Path(word).parts
    inside = next((index for index, part in enumerate(parts) if part in _PATHS), None)
    return word if inside is None or not os.path.isabs(word) else str(Path(*parts[inside:]))
