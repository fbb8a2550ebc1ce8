"""What training tools put before a model's own names: DataParallel, torch.compile, Lightning and others."""

from __future__ import annotations

import re
from collections.abc import Iterable

from torch import nn

from merging.checkpoints.names import module_names
from merging.checkpoints.source import CheckpointSource, RenamedSource

_COMPILED = re.compile(r"(?<![^.])_orig_mod\.")  # may stand before any module
_PREFIXES = ("module.", "model.", "net.", "network.", "backbone.", "student.", "base_model.model.")


def unwrapped(
    source: CheckpointSource, model: nn.Module | None, base: CheckpointSource | None = None
) -> CheckpointSource:
    """The tensors under the model's own names, where one prefix makes all the difference; a note says which.

    Without `base`, `source` is the base itself and its names must become those of `model`. Names that fit as
    they are, or in more than one way, are left alone.
    """
    names = source.names()
    wanted = frozenset(base.names()) if base is not None else frozenset()
    if base is None and model is None:
        return source
    best, found = len(_fitting(names, model, wanted)), None
    if best == len(names):
        return source
    for prefix in ("", *_PREFIXES):
        plain = _without(names, prefix)
        if plain is None:
            continue
        fitting = len(_fitting(plain.values(), model, wanted))
        if fitting > best:
            best, found = fitting, (prefix, plain)
    if found is None:
        return source
    prefix, plain = found
    parts = ["_orig_mod."] if any(_COMPILED.search(name) for name in names) else []
    result = RenamedSource(source, {inside: name for name, inside in plain.items()})
    said = " and ".join(f'"{part}"' for part in (*parts, *([prefix] if prefix else ())))
    result.notes += (
        f"{source.label}: names are read without {said}, which a training tool has put before them",
    )
    return result


def _without(names: Iterable[str], prefix: str) -> dict[str, str] | None:
    """Name -> the name without wrappers; None if nothing changes or two names become one."""
    plain = {name: _COMPILED.sub("", name).removeprefix(prefix) for name in names}
    changed = any(name != inside for name, inside in plain.items())
    return plain if changed and len(set(plain.values())) == len(plain) else None


def _fitting(names: Iterable[str], model: nn.Module | None, wanted: frozenset[str]) -> set[str]:
    """Names that the base has, or that have a place in the model."""
    names = tuple(names)
    placed = {} if model is None else module_names(model, names).renamed
    return {name for name in names if name in wanted or name in placed}
