"""One module a table: `add_arguments` says what it can be asked, `measured` makes its section."""

from __future__ import annotations

import argparse
from typing import Protocol

from benchmarks.section import Found
from benchmarks.tables import calibrate, growth, lora, merge, peak, two_processes, vision


class Table(Protocol):
    """What a module of this folder offers."""

    __doc__: str | None

    def add_arguments(self, parser: argparse.ArgumentParser) -> None: ...

    def measured(self, options: argparse.Namespace) -> Found: ...


TABLES: dict[str, Table] = {
    "merge": merge,
    "vision": vision,
    "calibrate": calibrate,
    "lora": lora,
    "growth": growth,
    "peak": peak,
    "two_processes": two_processes,
}
