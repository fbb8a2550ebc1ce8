"""Which backbone reads a checkpoint, by its config."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from merging.backbones.open_clip import OPEN_CLIP, OpenClipConfig
from merging.checkpoints.config_bounds import refuse_unbounded
from merging.checkpoints.folder import config as read_config
from merging.checkpoints.folder import open_clip_config
from merging.components import backbones
from merging.contracts.backbone import Backbone
from merging.errors import CheckpointError, SpecError
from merging.libraries import reading_with
from merging.spec import Component
from merging.spec.component import AUTO, AutoSettings


def select_backbone(folder: Path, choice: Component) -> Backbone | None:
    """The backbone by name, or the one that takes the `model_type` of the folder's config; None without a
    config."""
    kind = _kind(folder)
    if choice.type != AUTO:
        if kind is None and read_config(folder) is None:
            raise CheckpointError(f"{folder} has no config.json, so its architecture is not known")
        chosen = backbones.get(choice.type)
        if (kind == OPEN_CLIP) != (OPEN_CLIP in chosen.model_types):
            ours = "open_clip_config.json" if kind == OPEN_CLIP else f'a config.json of "{kind}"'
            raise CheckpointError(
                f'{folder} has {ours}, which backbone "{choice.type}" does not read',
                remedy='Leave "backbone" out, and it is chosen by the config.',
            )
        return chosen(_model_config(folder), choice.settings, folder=folder)
    if kind is None:
        return None
    assert isinstance(choice.settings, AutoSettings)
    for name in backbones.names():
        if kind in backbones.get(name).model_types:
            return backbones.get(name)(_model_config(folder), folder=folder)
    return backbones.get("transformers")(_model_config(folder), folder=folder)


def _kind(folder: Path) -> str | None:
    """`model_type` of the folder's config, or open_clip's; None without a config that says it."""
    if open_clip_config(folder) is not None:
        return OPEN_CLIP
    found = read_config(folder)
    return None if found is None else str(found.get("model_type", "")) or None


def _model_config(folder: Path) -> Any:
    found = open_clip_config(folder)
    if found is None:
        return partial(transformers_config, folder)
    place = folder if folder.is_dir() else folder.parent
    refuse_unbounded(place / "open_clip_config.json", found, folder)
    return OpenClipConfig(**found)


def ties_head(folder: Path) -> bool:
    """Whether the folder's config ties head and embedding; where transformers knows its default, that
    counts."""
    found = read_config(folder)
    if found is None:
        return False
    if "tie_word_embeddings" in found or "model_type" not in found:
        return bool(found.get("tie_word_embeddings", False))
    return bool(getattr(transformers_config(folder), "tie_word_embeddings", False))


def transformers_config(folder: Path) -> Any:
    from transformers import AutoConfig

    place = folder if folder.is_dir() else folder.parent
    refuse_unbounded(place / "config.json", read_config(folder) or {}, folder)
    remedy = "Tensor-wise rules need no config; others need one that this transformers release knows."
    with reading_with(SpecError, f"the config of {place} cannot be used", remedy=remedy):
        return AutoConfig.from_pretrained(place, local_files_only=True, trust_remote_code=False)
