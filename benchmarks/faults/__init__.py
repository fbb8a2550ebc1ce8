"""One module a kind of fault: `add_arguments` says what it can be asked, `measured` makes its section."""

from __future__ import annotations

from benchmarks.faults import disk_full, fuzz, kills, soak
from benchmarks.tables import Table

FAULTS: dict[str, Table] = {"kills": kills, "disk_full": disk_full, "fuzz": fuzz, "soak": soak}
