"""Examples shared out to the processes of a run: of every batch each gets a part of the rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from merging.contracts.backbone import Batch
from merging.errors import DataError
from merging.ranks import Ranks


def shared(batches: Sequence[Batch], ranks: Ranks, task: str) -> Sequence[Batch]:
    """This process's part. Raises DataError where some process would have none."""
    if ranks.size == 1:
        return batches
    parts = [
        (place, slice(rows.start, rows.stop))
        for place, batch in enumerate(batches)
        if len(rows := ranks.share_of(len(next(iter(batch.values())))))
    ]
    if not parts:
        raise DataError(
            f'task "{task}" has fewer calibration examples in every batch than the run has processes '
            f"({ranks.size})",
            remedy="Give more examples in a batch, or run fewer processes.",
        )
    return _Part(batches, parts)


class _Part(Sequence[Batch]):
    """Rows of some batches, read when asked for."""

    def __init__(self, batches: Sequence[Batch], parts: list[tuple[int, slice]]) -> None:
        self._batches, self._parts = batches, parts

    def __len__(self) -> int:
        return len(self._parts)

    def __getitem__(self, index: Any) -> Any:
        place, rows = self._parts[index]
        return {name: value[rows] for name, value in self._batches[place].items()}
