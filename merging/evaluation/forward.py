"""Running a whole model on a batch, without gradients.

Shape letters: B examples, F final feature.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from merging.contracts.backbone import Backbone, Batch
from merging.data.task import Examples
from merging.errors import Problem, TracingError
from merging.registry import did_you_mean
from merging.tracer import hollow

_USUAL = frozenset(
    (
        *("pixel_values", "input_ids", "attention_mask", "token_type_ids", "position_ids", "input_features"),
        *("decoder_input_ids", "decoder_attention_mask", "labels"),
    )
)


@torch.no_grad()
def output(model: nn.Module, backbone: Backbone, batch: Batch) -> Any:
    """What the model answers, in eval mode."""
    model.eval()
    return model(**backbone.forward_kwargs(placed(batch, model)))


@torch.no_grad()
def features(model: nn.Module, backbone: Backbone, batch: Batch) -> Tensor:
    """What heads read (B F), in float32."""
    return backbone.features(output(model, backbone, batch), batch).float()


def all_features(model: nn.Module, backbone: Backbone, examples: Examples) -> Iterator[Tensor]:
    """What heads read (B F), batch by batch, on the CPU."""
    for batch in examples.batches():
        yield features(model, backbone, batch).cpu()


def features_width(backbone: Backbone) -> int | None:
    """How many features heads get of an image or a text, found without weights; None for models of anything
    else. Raises DataError for a model that gives heads nothing to read."""
    try:
        example = backbone.example()
    except TracingError:  # the backbone gives none
        return None
    if not example.keys() & {"pixel_values", "input_ids"}:
        return None
    return int(features(hollow(backbone), backbone, example).shape[-1])


def gives_pooled(backbone: Backbone) -> bool:
    """Whether heads get what a pooler makes of the first token, found without weights."""
    try:
        answer = output(hollow(backbone), backbone, backbone.example())
    except TracingError:  # the backbone gives no example
        return False
    return getattr(answer, "pooler_output", None) is not None


def picture_problem(backbone: Backbone, batch: Batch) -> str:
    """Why the model takes no pictures of this batch's size; empty where it does, or where that is not known.
    Found without weights, and at once where the size is that of the backbone's own example."""
    try:
        example = backbone.example()
    except TracingError:
        return ""
    given, own = batch.get("pixel_values"), example.get("pixel_values")
    if given is None or own is None or given.shape[1:] == own.shape[1:]:
        return ""
    model = hollow(backbone)
    tried = {**example, **{name: value[:1] for name, value in batch.items()}}
    try:
        output(model, backbone, tried)
    except Exception as error:  # a library's, for whatever does not fit
        try:
            output(model, backbone, example)
        except Exception:  # it does not run without weights, which says nothing of pictures
            return ""
        sizes = " x ".join(map(str, given.shape[1:])), " x ".join(map(str, own.shape[1:]))
        told = " ".join(str(error).split())
        return f"its pictures are {sizes[0]}, the model takes {sizes[1]} ({told[:200]})"
    return ""


def odd_input_problem(backbone: Backbone, batch: Batch) -> str:
    """Which input the model's forward names and yet fails on: a mask of patches, say, where it has no token
    to put there. Empty where there is none, or where that is not known. Found without weights, on the first
    example, and only where there are inputs beside the usual ones."""
    odd = [name for name in batch if name not in _USUAL]
    if not odd:
        return ""
    model = hollow(backbone)
    one = {name: value[:1] for name, value in batch.items()}
    error = _failure(model, backbone, one)
    for name in odd if error is not None else ():
        if _failure(model, backbone, {other: value for other, value in one.items() if other != name}) is None:
            told = " ".join(f"{type(error).__name__}: {error}".split())
            return f'the model fails on the input "{name}", and runs without it ({told[:200]})'
    return ""


def _failure(model: nn.Module, backbone: Backbone, batch: Batch) -> Exception | None:
    try:
        output(model, backbone, batch)
    except Exception as error:  # a library's, for whatever does not fit
        return error
    return None


def padding_problem(backbone: Backbone, examples: Examples) -> str:
    """Why heads would read padding: a pooler is on the first token, and texts are padded before it."""
    first = examples.batches()[0]
    if "input_ids" not in first or "attention_mask" not in first:
        return ""
    masks = (batch["attention_mask"] for batch in examples.batches())
    padded = sum(int((mask[:, 0] == 0).sum()) for mask in masks if mask.ndim == 2)
    if not padded or not gives_pooled(backbone):
        return ""
    return f"{padded} of {len(examples)} texts are padded at their beginning, where the model's pooler reads"


def placed(batch: Batch, model: nn.Module) -> dict[str, Tensor]:
    """The batch on the model's device; floating inputs in the dtype of its parameters."""
    parameter = next((one for one in model.parameters() if one.is_floating_point()), None)
    if parameter is None:
        return dict(batch)
    return {
        name: value.to(parameter.device, parameter.dtype if value.is_floating_point() else value.dtype)
        for name, value in batch.items()
    }


def input_problems(examples: Examples, model: nn.Module, where: str) -> list[Problem]:
    """Inputs whose names the model's forward does not take. A skeleton will do for the model."""
    parameters = inspect.signature(model.forward).parameters
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
        named = [name for name, one in parameters.items() if one.kind is not inspect.Parameter.VAR_KEYWORD]
        # transformers' forwards end in **kwargs, which swallow a misspelt input.
        parameters = {name: parameters[name] for name in named}  # type: ignore[assignment]
    unknown = [name for name in examples.batches()[0] if name not in parameters]
    return [
        Problem(where, f'the model takes no input "{name}"', did_you_mean(name, parameters))
        for name in unknown
    ]
