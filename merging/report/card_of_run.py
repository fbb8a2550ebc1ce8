"""tell_scores_: a finished checkpoint's model card says what was measured of it."""

from __future__ import annotations

from pathlib import Path

from merging.checkpoints.amending import amend_
from merging.report.card import with_results
from merging.report.report import Report


def tell_scores_(checkpoint: Path, report: Report, *, scratch: Path) -> None:
    """Put the scores into README.md, if it is there and anything was scored. `scratch`: as in `amend_`."""
    card = checkpoint / "README.md"
    if card.is_file():
        told = with_results(card.read_text(encoding="utf-8"), report)
        amend_(checkpoint, card.name, told, scratch=scratch)
