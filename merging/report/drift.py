"""Drift per block before and after calibrating, for each task and on average."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from pydantic import Field

from merging.report.entry import Entry

if TYPE_CHECKING:
    from merging.evaluation.drift import BlockDrift


class Distance(Entry):
    """Between hidden states of one model and the expert's; means over tokens."""

    cosine: float
    distance: float = Field(description="|h_m - h_e| / |h_e|")


class DriftRow(Entry):
    """One block."""

    block: str
    merged: Distance | None = None
    calibrated: Distance | None = None


class DriftReport(Entry):
    """Blocks in forward order."""

    examples: int = Field(default=0, description="Examples per task, at most.")
    tasks: dict[str, tuple[DriftRow, ...]] = Field(default_factory=dict)
    mean: tuple[DriftRow, ...] = Field(
        default=(), description="Unweighted mean over the tasks that reach it."
    )

    @classmethod
    def of(cls, measured: Mapping[str, Mapping[str, Sequence[BlockDrift]]], *, examples: int) -> DriftReport:
        """`measured`: task -> what `evaluation.drift.drift` gave for the models "merged" and "calibrated"."""
        tasks = {task: _rows(of_models) for task, of_models in measured.items()}
        blocks: dict[str, list[DriftRow]] = {}
        for rows in tasks.values():
            for row in rows:
                blocks.setdefault(row.block, []).append(row)
        return cls(examples=examples, tasks=tasks, mean=tuple(_mean_row(rows) for rows in blocks.values()))


def _rows(of_models: Mapping[str, Sequence[BlockDrift]]) -> tuple[DriftRow, ...]:
    rows: dict[str, dict[str, Distance]] = {}
    for model, drifts in of_models.items():
        for one in drifts:
            rows.setdefault(one.block, {})[model] = Distance(cosine=one.cosine, distance=one.distance)
    return tuple(DriftRow(block=block, **distances) for block, distances in rows.items())


def _mean_row(rows: Sequence[DriftRow]) -> DriftRow:
    return DriftRow(
        block=rows[0].block,
        merged=_mean([row.merged for row in rows]),
        calibrated=_mean([row.calibrated for row in rows]),
    )


def _mean(distances: Sequence[Distance | None]) -> Distance | None:
    known = [one for one in distances if one is not None]
    if len(known) < len(distances):
        return None
    return Distance(
        cosine=sum(one.cosine for one in known) / len(known),
        distance=sum(one.distance for one in known) / len(known),
    )
