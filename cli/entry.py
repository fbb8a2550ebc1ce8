"""Where the command `merging` begins: it answers signals before it loads anything."""

from __future__ import annotations

from . import signals


def run() -> None:
    """Ends the process with the command's exit code."""
    signals.answer_at_once()
    from .main import run as follow

    follow()
