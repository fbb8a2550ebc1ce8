"""Names in files <-> names in modules, by transformers' own rules for loading."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn


@dataclass(frozen=True)
class NameMap:
    """How the tensors of a checkpoint meet those of a module.

    `converted` names take part in more than a renaming (experts that are stacked, projections that are
    split); they map to the first module name that they contribute to. `unused` are names that the module
    does not have, `obsolete` those of them that its class once stored and now computes itself, `doubled`
    those that another name fills already (stored with and without a prefix), `missing`
    module names (parameters and stored buffers) that nothing fills, ties taken into account. `ties`: module
    name -> the one whose tensor it shares.
    """

    renamed: Mapping[str, str]
    converted: Mapping[str, str] = field(default_factory=dict)
    unused: tuple[str, ...] = ()
    obsolete: tuple[str, ...] = ()
    doubled: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    ties: Mapping[str, str] = field(default_factory=dict)

    @property
    def stripped(self) -> str:
        """The prefix that all names in the file share and those in the module lack; often empty."""
        stored, inside = _common_prefix(self.renamed), _common_prefix(self.renamed.values())
        return stored if len(stored) > len(inside) else ""


def module_names(model: nn.Module, names: Iterable[str]) -> NameMap:
    """Which tensor of `model` each stored name fills. A plain module's names are those of its state dict."""
    state = model.state_dict()
    renamed: dict[str, str] = {}
    converted: dict[str, str] = {}
    unused, doubled = [], []
    ties = tied_names(model)
    filled: dict[str, str] = {}
    rename = _Renaming(model, state)
    for name in names:
        inside, needs_conversion = rename(name)
        if inside not in state:
            unused.append(name)
        elif needs_conversion:
            converted[name] = inside
        elif inside in filled:  # stored twice, with and without a prefix: the plain name counts
            plain, other = (name, filled[inside]) if name == inside else (filled[inside], name)
            renamed.pop(other, None)
            renamed[plain] = inside
            filled[inside] = plain
            unused.append(other)
            doubled.append(other)
        else:
            renamed[name] = inside
            filled[inside] = name
    present = {*filled, *converted.values()}
    present |= {name for name in state if tie_group(name, ties) & present}
    reached = present | _conversion_targets(rename, state, converted)
    missing = tuple(name for name in state if name not in reached)
    obsolete = _obsolete(model, unused)
    return NameMap(renamed, converted, tuple(unused), obsolete, tuple(doubled), missing, ties)


def tied_names(model: nn.Module) -> dict[str, str]:
    """Module name -> the name whose tensor it shares, for models whose config ties them."""
    found = getattr(model, "all_tied_weights_keys", None)
    return dict(found) if isinstance(found, Mapping) else {}


def tie_group(name: str, ties: Mapping[str, str]) -> set[str]:
    """All names that share the tensor of `name`, itself among them."""
    origin = ties.get(name, name)
    return {origin, *(target for target, source in ties.items() if source == origin)}


def _obsolete(model: nn.Module, names: Iterable[str]) -> tuple[str, ...]:
    """Names that from_pretrained passes over too: rotary tables, positions, causal masks of old files."""
    patterns = list(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())
    buffers = [name for name, _ in model.named_buffers()]
    for buffer, pattern in (
        ("rotary_emb.inv_freq", r"rotary_emb\.inv_freq"),
        ("position_ids", r"(^|\.)position_ids$"),
    ):
        if any(name.endswith(buffer) for name in buffers):
            patterns.append(pattern)
    return tuple(name for name in names if any(re.search(pattern, name) for pattern in patterns))


class _Renaming:
    """What transformers does to one name when it loads a checkpoint; the identity for other modules."""

    # These functions are not part of transformers' public interface, but they alone know the renamings of
    # each architecture; from_pretrained calls them in just this way.

    def __init__(self, model: nn.Module, state: Mapping[str, object]) -> None:
        from transformers import PreTrainedModel

        self._state = state
        self._is_pretrained = isinstance(model, PreTrainedModel)
        if not self._is_pretrained:
            return
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightRenaming

        self._prefix = _prefix(model)
        transforms = get_model_conversion_mapping(model)
        self._renamings = [entry for entry in transforms if isinstance(entry, WeightRenaming)]
        self._converters = [entry for entry in converters_of(model) if _applies(entry, state)]

    def __call__(self, name: str) -> tuple[str, bool]:
        """The name in the module, and whether the tensor has to be converted on the way."""
        if not self._is_pretrained:
            return name, False
        inside, converts = self._renamed(name)
        if inside in self._state:
            return inside, converts
        if name in self._state:
            return name, False
        # Before 5.16, what was saved as a bare model had its renamings only under the prefix.
        prefixed, prefixed_converts = self._renamed(f"{self._prefix}.{name}")
        return (prefixed, prefixed_converts) if prefixed in self._state else (inside, converts)

    def _renamed(self, name: str) -> tuple[str, bool]:
        from transformers.core_model_loading import rename_source_key

        inside, pattern = rename_source_key(
            name, self._renamings, self._converters, self._prefix, self._state
        )
        return inside, pattern is not None

    def siblings(self, name: str) -> list[str]:
        """Patterns of all module names that the converter of a stored name fills, if it fills several."""
        plain = name
        for renaming in self._renamings:
            plain, _ = renaming.rename_source_key(plain)
        for converter in self._converters:
            if converter.rename_source_key(plain)[1] is not None:
                return list(converter.target_patterns)
        return []


def _prefix(model: nn.Module) -> str:
    """Under which a bare model lies in this one, or lay where it was saved."""
    prefix = str(getattr(model, "base_model_prefix", ""))
    inside = [name for name in ("vision_model", "text_model") if hasattr(model, name)]
    # Before 5.24, towers of CLIP with a projection went by the prefix of the whole.
    return inside[0] if len(inside) == 1 and not hasattr(model, prefix) else prefix


def converters_of(model: nn.Module) -> list[Any]:
    """How stored tensors become one, or several, when transformers loads a model of this class."""
    from transformers import PreTrainedModel
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter

    if not isinstance(model, PreTrainedModel):
        return []
    return [entry for entry in get_model_conversion_mapping(model) if isinstance(entry, WeightConverter)]


def _applies(converter: Any, state: Mapping[str, object]) -> bool:
    """False where experts are to be stacked that this module holds one by one, as they are stored."""
    stacks = any(type(operation).__name__ == "MergeModulelist" for operation in converter.operations)
    return not stacks or any(name.endswith(converter.target_patterns[0]) for name in state)


def _conversion_targets(
    rename: _Renaming, state: Mapping[str, object], converted: Mapping[str, str]
) -> set[str]:
    """Module names that one converted tensor fills beside the first: q, k and v of a fused projection."""
    reached = set(converted.values())
    for name, inside in converted.items():
        patterns = rename.siblings(name)
        if len(patterns) > 1 and patterns[0] in inside:
            reached |= {inside.replace(patterns[0], pattern, 1) for pattern in patterns[1:]} & state.keys()
    return reached


def _common_prefix(names: Iterable[str]) -> str:
    """The leading parts that all names share, with the final dot; never a whole name."""
    common: list[str] | None = None
    for name in names:
        parts = name.split(".")[:-1]
        if common is None:
            common = parts
            continue
        length = 0
        while length < min(len(common), len(parts)) and common[length] == parts[length]:
            length += 1
        common = common[:length]
    return "".join(f"{part}." for part in common or ())
