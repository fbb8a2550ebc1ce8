"""Any transformers model: blocks found by inspection."""

from __future__ import annotations

from merging.backbones.pretrained import TransformersBackbone


class AnyTransformers(TransformersBackbone):
    """Any other model of transformers; its blocks are the outermost lists of like layers that hold
    linears."""
