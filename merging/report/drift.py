"""Drift before and after calibrating, per block and at the output, for each task and on average."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from pydantic import Field

from merging.report.entry import Entry

if TYPE_CHECKING:
    from merging.evaluation.drift import ModelDrift, OutputDrift


class Distance(Entry):
    """Between hidden states of one model and the expert's; means over tokens, or over examples at the output.

    FeatCal's split of h_m - h_e: the local mismatch, both models' block on what enters the expert's, and the
    upstream propagation, the rest."""

    cosine: float
    distance: float = Field(description="|h_m - h_e| / |h_e|")
    local: float | None = Field(default=None, description="|local mismatch| / |h_e|")
    upstream: float | None = Field(default=None, description="|upstream propagation| / |h_e|")
    local_share: float | None = Field(
        default=None,
        description="Share of the squared drift that lies along the local mismatch; the rest is upstream's.",
    )
    frechet: float | None = Field(
        default=None,
        description="2-Wasserstein distance between the tokens as Gaussians, in the hidden states' units.",
    )
    frechet_relative: float | None = Field(
        default=None, description="The same, divided by the root mean square of |h_e|."
    )


class DriftRow(Entry):
    """One block."""

    block: str
    merged: Distance | None = None
    calibrated: Distance | None = None


class OutputRow(Entry):
    """The final features, which heads read."""

    examples: int
    merged: Distance | None = None
    calibrated: Distance | None = None
    farther: int = Field(default=0, description="Examples whose distance grew by calibrating.")


class DriftReport(Entry):
    """Blocks in forward order."""

    examples: int = Field(default=0, description="Examples per task, at most.")
    measured_on: dict[str, str] = Field(default_factory=dict, description="Task -> which examples these are.")
    tasks: dict[str, tuple[DriftRow, ...]] = Field(default_factory=dict)
    mean: tuple[DriftRow, ...] = Field(
        default=(), description="Unweighted mean over the tasks that reach it."
    )
    output: dict[str, OutputRow] = Field(default_factory=dict, description="Task -> its final features.")

    @classmethod
    def of(
        cls,
        measured: Mapping[str, Mapping[str, ModelDrift]],
        *,
        examples: int,
        measured_on: Mapping[str, str] | None = None,
    ) -> DriftReport:
        """`measured`: task -> what `evaluation.drift.drift` gave for the models "merged" and "calibrated"."""
        tasks = {task: _rows(of_models) for task, of_models in measured.items()}
        blocks: dict[str, list[DriftRow]] = {}
        for rows in tasks.values():
            for row in rows:
                blocks.setdefault(row.block, []).append(row)
        outputs = {task: _output(of_models) for task, of_models in measured.items()}
        return cls(
            examples=examples,
            measured_on=dict(measured_on or {}),
            tasks=tasks,
            mean=tuple(_mean_row(rows) for rows in blocks.values()),
            output={task: row for task, row in outputs.items() if row is not None},
        )


def _rows(of_models: Mapping[str, ModelDrift]) -> tuple[DriftRow, ...]:
    rows: dict[str, dict[str, Distance]] = {}
    for model, found in of_models.items():
        for one in found.blocks:
            rows.setdefault(one.block, {})[model] = Distance(
                cosine=one.cosine,
                distance=one.distance,
                local=one.local,
                upstream=one.upstream,
                local_share=one.local_share,
                frechet=one.frechet,
                frechet_relative=one.frechet_relative,
            )
    return tuple(DriftRow(block=block, **distances) for block, distances in rows.items())


def _output(of_models: Mapping[str, ModelDrift]) -> OutputRow | None:
    found = {model: one.output for model, one in of_models.items() if one.output is not None}
    if not found:
        return None
    merged, calibrated = found.get("merged"), found.get("calibrated")
    farther = 0
    if merged is not None and calibrated is not None:
        pairs = zip(merged.distances, calibrated.distances, strict=True)
        farther = sum(after > before for before, after in pairs)
    return OutputRow(
        examples=len(next(iter(found.values())).distances),
        farther=farther,
        **{model: _of_examples(one) for model, one in found.items()},
    )


def _of_examples(output: OutputDrift) -> Distance:
    count = len(output.distances)
    return Distance(cosine=sum(output.cosines) / count, distance=sum(output.distances) / count)


def _mean_row(rows: Sequence[DriftRow]) -> DriftRow:
    return DriftRow(
        block=rows[0].block,
        merged=mean_of([row.merged for row in rows]),
        calibrated=mean_of([row.calibrated for row in rows]),
    )


def mean_of(distances: Sequence[Distance | None]) -> Distance | None:
    """Of each number, over all; None for a number that some lack."""
    known = [one for one in distances if one is not None]
    if len(known) < len(distances):
        return None
    means = {}
    for name in Distance.model_fields:
        values = [value for value in (getattr(one, name) for one in known) if value is not None]
        means[name] = sum(values) / len(values) if len(values) == len(known) else None
    return Distance(**means)  # type: ignore[arg-type]
