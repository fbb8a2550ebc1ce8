"""Which tensors of a model for one task lie outside its backbone, by the model class's own layout."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

_WHOLE = re.compile(r"For[A-Z]|LMHead|WithLMHead|MTModel")  # LlamaForCausalLM, GPT2LMHeadModel, MarianMTModel
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


def is_of_a_task(architecture: str | None) -> bool:
    """Whether the class answers one task, and so has a head that no other task's model shares."""
    return bool(architecture) and str(architecture).endswith(_TASKS)


def has_output(architecture: str | None) -> bool:
    """Whether the class has an output head that is of no one task, as language models have."""
    return bool(_WHOLE.search(architecture or "")) and not is_of_a_task(architecture)


def is_backbone_of(architecture: str | None, whole: str) -> bool:
    """Whether the class is that other one without its head, as LlamaModel is LlamaForCausalLM's."""
    stem = (architecture or "").removesuffix("Model")
    return stem != architecture and whole.startswith(stem) and bool(_WHOLE.match(whole, len(stem)))


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
    if not is_of_a_task(architecture):
        return ""
    import transformers

    found = getattr(transformers, str(architecture), None)
    prefix = getattr(found, "base_model_prefix", "")
    return f"{prefix}." if prefix else ""
