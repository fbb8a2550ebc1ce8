"""Where this package keeps what it may lose: $MERGING_CACHE, or ~/.cache/merging."""

from __future__ import annotations

import os
from pathlib import Path

VARIABLE = "MERGING_CACHE"


def cache_folder() -> Path:
    """Not created here."""
    chosen = os.environ.get(VARIABLE)
    return Path(chosen) if chosen else Path.home() / ".cache" / "merging"
