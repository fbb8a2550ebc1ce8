"""Zero-shot heads: class names and templates through the text tower of a CLIP.

Shape letters: B texts at a time, C classes, T tokens, F final feature.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from merging.data.clip_text import TextTower, text_tower
from merging.data.task import LinearHead
from merging.data.zero_shot_spec import SLOT, ZeroShotHeadSpec
from merging.errors import DataError
from merging.working_folder import working_folder

BATCH = 256
"""Texts that are embedded at a time."""


def zero_shot_head(spec: ZeroShotHeadSpec, *, task: str, base: Path, known: Sequence[str] = ()) -> LinearHead:
    """The head (C F) of CLIP's paper: for each class the mean of its normalised sentences, normalised, times
    the logit scale; it reads normalised features. Names and tokenizer are checked now, the text tower is run
    when the weights are first asked for. `base`: the base's folder, for specs that name no model; `known`:
    classes as the task's examples name them, for specs that do not."""
    from merging.checkpoints.hub import resolve

    where = f'task "{task}": head'
    names = class_names(spec.classes, where) if spec.classes is not None else _readable(known, where)
    folder = base if spec.model is None else resolve(spec.model, folder=working_folder(needed=False)).path
    tower = text_tower(folder, where)
    made = partial(class_weights, tower, names, spec.templates)
    return LinearHead.later(made, (len(names), tower.features), normalises=True, names=names)


def _readable(known: Sequence[str], where: str) -> tuple[str, ...]:
    """Names of folders or of a data set's classes, as words."""
    if len(known) < 2:
        raise DataError(
            f"{where}: the task's examples name {len(known) or 'no'} classes, and the head lists none",
            remedy='Give their names in the order of the labels: "classes": ["cat", "dog"].',
        )
    return tuple(name.replace("_", " ").strip() for name in known)


@torch.no_grad()
def class_weights(tower: TextTower, names: Sequence[str], templates: Sequence[str]) -> Tensor:
    """C F; `tower` gives embeddings (B F) of texts and the logit scale."""
    texts = [template.replace(SLOT, name) for name in names for template in templates]
    parts = [tower.embed(texts[start : start + BATCH]) for start in range(0, len(texts), BATCH)]
    embedded = torch.nn.functional.normalize(torch.cat(parts).float(), dim=-1)
    mean_CF = embedded.reshape(len(names), len(templates), -1).mean(dim=1)
    return tower.scale() * torch.nn.functional.normalize(mean_CF, dim=-1)


def class_names(given: Sequence[str] | Path, where: str) -> tuple[str, ...]:
    """The names, read from a file where one is given. Raises DataError for a file of none."""
    if not isinstance(given, Path):
        return tuple(given)
    try:
        text = given.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{where}: the class names in {given} cannot be read: {error}") from error
    if given.suffix.lower() == ".json":
        try:
            found = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{where}: {given} is not valid JSON: {error}") from error
        if not isinstance(found, list) or not all(isinstance(name, str) and name.strip() for name in found):
            raise DataError(f"{where}: {given} is not a JSON list of class names")
    else:
        found = [line.strip() for line in text.splitlines() if line.strip()]
    if len(found) < 2:
        raise DataError(f"{where}: {given} has {len(found)} class names, expected at least 2")
    return tuple(found)
