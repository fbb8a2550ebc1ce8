"""compare_configs: where an expert's config says that its weights mean something else than the base's."""

from __future__ import annotations

import re
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any, NamedTuple

from merging.backbones.open_clip import filled as open_clip_filled
from merging.checkpoints.config_bounds import refuse_unbounded
from merging.checkpoints.folder import config as read_config
from merging.checkpoints.folder import open_clip_config
from merging.errors import CheckpointError
from merging.libraries import reading_with

KIND = "model_type"

_HARMLESS = re.compile(
    r"_.*|transformers_version|(torch_)?dtype|architectures|id2label|label2id|num_labels|problem_type"
    r"|use_cache|return_dict|output_.*|.*drop.*|initializer_.*|.*_token_id|task_specific_params"
    r"|tie_word_embeddings|gradient_checkpointing|name_or_path|finetuning_task|max_length|torchscript|logit_scale.*"
    r"|vocab_size(_per_layer_input)?"
    r"|init_logit_.*|quantization_config|auto_map|.*_config_dict"
)
_STRUCTURAL = re.compile(  # in names of fields that no class declares: what layers are, and how they run
    r".*(hidden|layer|depth|width|head|att(ention|n)|rope|rotary|position|alibi|norm|bias|window|patch"
    r"|image_size|(^|_)dim|embed|scal(e|ing)|activation|(^|_)act(_|$)|expert|gat(e|ing)|pool|kernel|stride"
    r"|channel|eps(ilon)?($|_)|ratio|group|causal|softcap|temperature).*"
)


class Differences(NamedTuple):
    """`both`: fields with another value than the base's, as sentences: what was found, what was expected.
    `single`: fields that only one of them has, and of which nothing tells what the other does without."""

    both: tuple[str, ...]
    single: tuple[str, ...]


def compare_configs(base: Path, expert: Path) -> Differences:
    """Fields that change what weights mean. A whole model is compared with a tower of it by the tower's part.
    Empty where one of them has no config, or they are of different libraries."""
    if (open_clip_config(base) is None) != (open_clip_config(expert) is None):
        return Differences((), ())
    ours, theirs = _raw(base), _raw(expert)
    if not ours or not theirs:
        return Differences((), ())
    known = [_filled(base, ours, theirs.get(KIND)), _filled(expert, theirs, ours.get(KIND))]
    filled = all(one is not None for one in known)
    if filled:
        ours, theirs = (one or {} for one in known)
    ours, theirs = _alike(ours, theirs)
    same_kind = ours.get(KIND, theirs.get(KIND)) == theirs.get(KIND, ours.get(KIND))
    ours, theirs = _flat(ours), _flat(theirs)
    both = [
        f"{key} {theirs[key]!r}, the base has {ours[key]!r}"
        for key in dict.fromkeys((KIND, *ours))
        if key in ours and key in theirs and ours[key] != theirs[key]
    ]
    single = []
    for key in [*theirs, *ours] if same_kind else ():
        if (key in ours) == (key in theirs) or (theirs | ours)[key] is None or key.endswith(KIND):
            continue
        if key in theirs:
            said = f"{key} {theirs[key]!r}, the base has none"
        else:
            said = f"no {key}, the base has {ours[key]!r}"
        if filled and _inside_of_both(key, ours, theirs):
            both.append(said)  # part of a setting that the class knows, such as how positions are scaled
        elif _STRUCTURAL.fullmatch(key):
            single.append(said)
    return Differences(tuple(both), tuple(single))


def _raw(folder: Path) -> dict[str, Any]:
    """As it stands; open_clip's with its own defaults."""
    if (two_towers := open_clip_config(folder)) is not None:
        return dict(open_clip_filled(two_towers["model_cfg"]))
    return read_config(folder) or {}


def _filled(folder: Path, raw: Mapping[str, Any], kind: Any) -> dict[str, Any] | None:
    """The config with transformers' defaults, `kind` its model type where it names none; None where
    transformers does not know the architecture, or cannot use what it says."""
    kind = raw.get(KIND, kind)
    if not isinstance(kind, str) or open_clip_config(folder) is not None:
        return None
    from transformers import CONFIG_MAPPING

    place = folder if folder.is_dir() else folder.parent
    if kind not in CONFIG_MAPPING:
        return None
    try:
        with reading_with(CheckpointError, f"the config of {place} cannot be used"):
            refuse_unbounded(place / "config.json", raw, folder)
            filled: dict[str, Any] = CONFIG_MAPPING[kind].from_dict(deepcopy(dict(raw))).to_dict()
            return filled
    except CheckpointError:  # told by who needs it; what it says can be compared as it stands
        return None


def _alike(ours: dict[str, Any], theirs: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Both, or where the one is a part of the other by its type, that part of it."""
    kinds = ours.get(KIND), theirs.get(KIND)
    if None in kinds or kinds[0] == kinds[1]:
        return ours, theirs
    return _part(ours, kinds[1]) or ours, _part(theirs, kinds[0]) or theirs


def _part(whole: Mapping[str, Any], kind: Any) -> dict[str, Any] | None:
    for name, inner in whole.items():
        usual = f"{whole.get(KIND)}_{name.removesuffix('_config')}_model"
        if isinstance(inner, Mapping) and inner.get(KIND, usual) == kind:
            return {KIND: kind, **inner}
    return None


def _inside_of_both(key: str, ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> bool:
    """Whether it is an entry of a field in which both have entries."""
    field = key.rpartition(".")[0]
    return bool(field) and all(any(one.startswith(f"{field}.") for one in side) for side in (ours, theirs))


def _flat(values: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """Path -> value, without what does not change the meaning of weights."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if _HARMLESS.fullmatch(key):
            continue
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{path}{key}.")
        else:
            flat[f"{path}{key}"] = list(value) if isinstance(value, tuple) else value
    return flat
