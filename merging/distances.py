"""distance: how far an expert's matrices lie from the base's, from the first rows of each."""

from __future__ import annotations

from typing import NamedTuple

import torch

from merging.checkpoints.source import CheckpointSource, TensorSpec
from merging.contracts.models import Models

SAMPLED_ROWS = 16  # of each matrix
_SAMPLED_ENTRIES = 1 << 20  # of one tensor at most, where a row is a whole matrix


class Distance(NamedTuple):
    """Of all sampled entries together: |expert - base| / |base|, and the cosine of expert and base.

    `emptied`: matrices of which all that was sampled is zero in the expert, and not in the base.
    """

    relative: float
    cosine: float
    emptied: tuple[str, ...] = ()

    @property
    def of_zeros(self) -> bool:
        """Whether all that was sampled of the expert is zero."""
        return (self.relative, self.cosine) == (1.0, 0.0)


def distance(models: Models, expert: CheckpointSource) -> Distance | None:
    """None where there is nothing to compare. Entries that are not finite are passed over, with their
    tensor."""
    dot = ours = theirs = apart = 0.0
    emptied: list[str] = []
    for name in models.base.names():
        spec = models.base.spec(name)
        matrix = len(spec.shape) >= 2 and spec.elements and spec.dtype.is_floating_point
        if not matrix or name in models.kept:
            continue
        rows = sampled_rows(spec)
        base_S, expert_S = (source.read(name, rows).double().flatten() for source in (models.base, expert))
        if not bool(torch.isfinite(base_S).all() and torch.isfinite(expert_S).all()):
            continue
        dot += float(base_S @ expert_S)
        ours, theirs = ours + float(base_S @ base_S), theirs + float(expert_S @ expert_S)
        if not bool(expert_S.any()) and bool(base_S.any()):
            emptied.append(name)
        apart += float((expert_S - base_S).square().sum())
    if not ours > 0:
        return None
    if not theirs > 0:
        return Distance(1.0, 0.0, tuple(emptied))
    return Distance((apart / ours) ** 0.5, dot / (ours * theirs) ** 0.5, tuple(emptied))


def sampled_rows(spec: TensorSpec) -> slice:
    """The rows of a matrix that are looked at, and the entries of a vector."""
    most = _SAMPLED_ENTRIES * spec.shape[0] // max(1, spec.elements)
    return slice(0, max(1, min(SAMPLED_ROWS if len(spec.shape) > 1 else most, spec.shape[0], most)))
