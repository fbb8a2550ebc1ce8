"""Which tensors of a model for one task lie outside its backbone, by the model class's own layout."""

from __future__ import annotations

from collections.abc import Callable, Iterable

_TASKS = (
    "ForSequenceClassification",
    "ForTokenClassification",
    "ForQuestionAnswering",
    "ForMultipleChoice",
    "ForNextSentencePrediction",
    "ForImageClassification",
    "ForImageClassificationWithTeacher",
    "ForVideoClassification",
    "ForSemanticSegmentation",
    "ForUniversalSegmentation",
    "ForObjectDetection",
    "ForDepthEstimation",
    "ForAudioFrameClassification",
    "ForXVector",
)


def head_of(architecture: str | None, names: Iterable[str]) -> Callable[[str], bool]:
    """Whether a tensor belongs to the head: all that a class for one task holds beside its backbone.

    `names`: the checkpoint's tensors. Language models have no such head, nor has a class that is not known.
    """
    prefix = _prefix(architecture)
    if not prefix or not any(name.startswith(prefix) for name in names):
        return lambda name: False
    known = frozenset(names)
    return lambda name: name in known and not name.startswith(prefix)


def _prefix(architecture: str | None) -> str:
    if not architecture or not architecture.endswith(_TASKS):
        return ""
    import transformers

    found = getattr(transformers, architecture, None)
    prefix = getattr(found, "base_model_prefix", "")
    return f"{prefix}." if prefix else ""
