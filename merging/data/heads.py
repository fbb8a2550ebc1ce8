"""Linear heads: read from a file, taken from an expert's checkpoint, written beside a run's results.

Shape letters: C classes, F final feature.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from merging.data.dense import ACTIVATIONS, Dense, dense_of
from merging.data.numbering import plain_name
from merging.data.task import Examples, Head, LinearHead, Task
from merging.data.tensor_file import open_tensor_file
from merging.errors import DataError, Problem

CLASSIFIERS = ("classifier", "score", "head", "fc")
"""Modules that hold a linear classifier in transformers, timm and open_clip, by their last name."""

_UNNAMED = re.compile(r"LABEL_\d+")  # how transformers calls a class without a name
_FLOATS = ("float16", "bfloat16", "float32", "float64")
_NORMALISED = "normalised"  # metadata of a head's file: what it reads
_ACTIVATION = "activation"  # the same, of a layer before the classifier


def load_head(path: Path, *, task: str) -> LinearHead:
    """A safetensors file with `weight` [classes, features] and optional `bias` [classes]; those that a run
    wrote may have a layer before it, `dense.weight` and `dense.bias`."""
    where = f'task "{task}": head'
    with open_tensor_file(Path(path), where) as file:
        about = file.metadata() or {}
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    dense = None
    if about.get(_ACTIVATION) in ACTIVATIONS and {"dense.weight", "dense.bias"} <= tensors.keys():
        dense = Dense(tensors.pop("dense.weight"), tensors.pop("dense.bias"), about[_ACTIVATION])
    unknown = sorted(tensors.keys() - {"weight", "bias"})
    if "weight" not in tensors or unknown:
        found = ", ".join(sorted(tensors)) or "no tensors"
        raise DataError(f'{where}: {path} has {found}, expected "weight" and optionally "bias"')
    normalises = about.get("features") == _NORMALISED
    place = f"{where}: {path}"
    return _checked(tensors["weight"], tensors.get("bias"), place, normalises=normalises, dense=dense)


def expert_head(
    tensors: Mapping[str, Tensor], *, task: str, config: Mapping[str, Any] | None = None
) -> LinearHead:
    """The classifier among the tensors which the expert's checkpoint keeps for its task, with the layer
    before it where the class of its `config` has one that is known."""
    where = f'task "{task}": head of the expert'
    found = [
        name.removesuffix(".weight")
        for name, tensor in tensors.items()
        if name.endswith(".weight") and _classifies(name.split(".")[:-1]) and tensor.ndim == 2
    ]
    if len(found) != 1:
        listed = ", ".join(found or sorted(tensors)) or "no tensors"
        raise DataError(
            f"{where}: {len(found)} linear classifiers in {listed}, expected one",
            remedy='Store it as safetensors and give it: "head": {"type": "linear", "path": "..."}.',
        )
    others = sorted(tensors.keys() - {f"{found[0]}.weight", f"{found[0]}.bias"})
    dense = dense_of(tensors, found[0], config) if others else None
    if others and dense is None:
        raise DataError(
            f"{where}: {found[0]} does not read the model's features: {others[0]} comes between",
            remedy='It is kept in "heads/". To score, give a linear head that reads the features, as "head".',
        )
    weight, bias = tensors[f"{found[0]}.weight"], tensors.get(f"{found[0]}.bias")
    return _checked(weight, bias, f"{where}: {found[0]}", dense=dense)


def _classifies(module: list[str]) -> bool:
    """Whether a module of that path is the last layer of a head."""
    last, owner = module[-1] if module else "", module[-2] if len(module) > 1 else ""
    return last in CLASSIFIERS or (last == "out_proj" and owner in (*CLASSIFIERS, "classification_head"))


def head_names(config: Mapping[str, Any] | None, classes: int) -> tuple[str, ...]:
    """The names of a head's classes, in its order, as its model's config has them; none where it has none of
    its own, or another number."""
    found = (config or {}).get("id2label")
    if not isinstance(found, Mapping) or found.keys() != {str(number) for number in range(classes)}:
        return ()
    names = tuple(str(found[str(number)]) for number in range(classes))
    return () if all(_UNNAMED.fullmatch(name) for name in names) else names


def save_head(head: LinearHead, path: Path) -> None:
    """Write what `load_head` reads."""
    from safetensors.torch import save_file

    tensors = {"weight": head.weight_CF.contiguous()}
    about = {"features": _NORMALISED} if head.normalises else {}
    if head.bias_C is not None:
        tensors["bias"] = head.bias_C.contiguous()
    if head.dense is not None:
        tensors["dense.weight"] = head.dense.weight_HF.contiguous()
        tensors["dense.bias"] = head.dense.bias_H.contiguous()
        about[_ACTIVATION] = head.dense.activation
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path, about or None)


def refuse_misfit(task: str, head: Head, features: int) -> None:
    """Raise a DataError where a linear head reads another number of features than the model gives."""
    if isinstance(head, LinearHead) and head.shape[-1] != features:
        raise DataError(
            f'task "{task}": the head reads {head.shape[-1]} features, the model gives {features}',
            remedy="Use the head that was trained on this model's features.",
        )


def label_problems(task: Task) -> list[Problem]:
    """Labels which the task's head has no class for; empty if there are none, or nothing to compare."""
    splits = {"validation": task.validation, "test": task.test}
    return [problem for split, examples in splits.items() for problem in _outside(task, split, examples)]


def order_problems(task: Task) -> list[Problem]:
    """Labels that are numbered by names (folders of images, a column of text) otherwise than the head's
    classes of these names."""
    head, found = task.head, []
    if head is None:
        return []
    ours = [plain_name(name) for name in head.names]
    for split, examples in {"validation": task.validation, "test": task.test}.items():
        theirs = [plain_name(name) for name in getattr(examples, "classes", ())]
        if any(name in ours and name not in ours[at : at + 1] for at, name in enumerate(theirs)):
            what = f"the {split} examples number the classes {', '.join(theirs[:4])}, ...; the head "
            what += f"{', '.join(ours[:4])}, ..."
            remedy = _order_remedy(head, of_images=hasattr(examples, "files"))
            found.append(Problem(f"tasks.{task.name}.head", what, remedy))
    return found


def _order_remedy(head: LinearHead, *, of_images: bool) -> str:
    if of_images and head.normalises:
        return "List the head's classes in the order of the sorted folder names."
    if of_images:
        return "Name the folders so that they sort as the head numbers its classes."
    listed = ", ".join(f'"{name}"' for name in head.names)
    return f'Number them as the head does: "labels": [{listed}].'


def _outside(task: Task, split: str, examples: Examples | None) -> list[Problem]:
    if examples is None or examples.labels is None or task.head is None:
        return []
    labels, classes = examples.labels, task.head.shape[0]
    outside = int(((labels < 0) | (labels >= classes)).sum())
    if not outside:
        return []
    found = f"labels from {int(labels.min())} to {int(labels.max())}, the head has {classes} classes"
    return [
        Problem(
            f'task "{task.name}"',
            f"{outside} of {len(labels)} {split} examples have no class in the head: {found}",
            "Use the head that was trained on these classes, in this order.",
        )
    ]


def _checked(
    weight: Tensor,
    bias: Tensor | None,
    where: str,
    *,
    normalises: bool = False,
    dense: Dense | None = None,
) -> LinearHead:
    shape, bias_shape = '"weight" is [classes, features]', '"bias" is [classes]'
    given = [("weight", weight, 2, shape), ("bias", bias, 1, bias_shape)]
    if dense is not None:
        given.append(("dense.weight", dense.weight_HF, 2, '"dense.weight" is [hidden, features]'))
        given.append(("dense.bias", dense.bias_H, 1, '"dense.bias" is [hidden]'))
    for name, tensor, axes, meant in given:
        if tensor is not None and not _is_of_head(tensor, axes):
            raise DataError(
                f'{where}: "{name}" is {tuple(tensor.shape)} of {tensor.dtype}, expected floats '
                f"({', '.join(_FLOATS)}): {meant}",
                remedy="Save the head anew, with all its tensors as float32.",
            )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise DataError(f'{where}: "bias" is {tuple(bias.shape)}, "weight" has {weight.shape[0]} classes')
    if dense is not None and dense.weight_HF.shape[:1] != weight.shape[1:]:
        raise DataError(
            f'{where}: "dense.weight" is {tuple(dense.weight_HF.shape)}, and "weight", which reads what it '
            f"makes, {tuple(weight.shape)}: expected as many rows as that has columns"
        )
    if dense is not None and dense.bias_H.shape != dense.weight_HF.shape[:1]:
        raise DataError(
            f'{where}: "dense.bias" is {tuple(dense.bias_H.shape)}, "dense.weight" has '
            f"{dense.weight_HF.shape[0]} rows: expected one value for each"
        )
    all_tensors = (weight, bias, *((dense.weight_HF, dense.bias_H) if dense is not None else ()))
    bad = sum(int((~torch.isfinite(tensor)).sum()) for tensor in all_tensors if tensor is not None)
    if bad:
        raise DataError(f"{where}: {bad} values are NaN or infinite")
    return LinearHead(weight, bias, normalises=normalises, dense=dense)


def _is_of_head(tensor: Tensor, axes: int) -> bool:
    """Whether it has that many axes, some values, and they are floats that can be computed with."""
    known = str(tensor.dtype).removeprefix("torch.") in _FLOATS
    return tensor.ndim == axes and known and tensor.numel() > 0
