"""Models: what a run works on, opened but not read, all tensors under the base's names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from merging.checkpoints.source import CheckpointSource
from merging.contracts.backbone import Backbone


@dataclass(frozen=True)
class Models:
    """Base and experts. `kept` lists the tensors that no rule may touch: they are the base's in every
    output."""

    base: CheckpointSource
    experts: Mapping[str, CheckpointSource]
    weights: Mapping[str, float]
    backbone: Backbone | None = (
        None  # None: tensors without a known architecture, enough for tensor-wise rules
    )
    kept: frozenset[str] = field(default_factory=frozenset)

    def weighed(self, weights: Mapping[str, float]) -> Models:
        """The same models with other weights."""
        return replace(self, weights=weights)

    @property
    def tasks(self) -> tuple[str, ...]:
        return tuple(self.experts)
