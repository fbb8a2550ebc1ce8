"""Which library laid out a CLIP: the same model has other names in each, and attention fused or split."""

from __future__ import annotations

from merging.checkpoints.source import CheckpointSource
from merging.errors import Problem

_TELLING = {  # a part of names that only one of them has -> how that one stores attention
    "open_clip": ("visual.transformer.resblocks.", "q, k and v of attention as one tensor"),
    "transformers": ("vision_model.encoder.layers.", "q, k and v of attention as three tensors"),
}


def mixed_libraries(base: CheckpointSource, expert: CheckpointSource) -> Problem | None:
    """A CLIP of the one library beside a base of the other."""
    ours, theirs = _library(base), _library(expert)
    if ours is None or theirs is None or ours == theirs:
        return None
    return Problem(
        expert.label,
        f"a CLIP as {theirs} stores it ({_TELLING[theirs][1]}), the base is one as {ours} does "
        f"({_TELLING[ours][1]})",
        "Use base and experts of one library: the common CLIP models are published for both. To convert your "
        "own: docs/clip.md, which has the names of both.",
    )


def _library(source: CheckpointSource) -> str | None:
    names = source.names()
    for library, (part, _) in _TELLING.items():
        if any(part in name for name in names):
            return library
    return None
