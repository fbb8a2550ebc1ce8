"""unmade: stored tensors among a model's own modules that the class does not make from its config."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from torch import nn

from merging.checkpoints.names import NameMap
from merging.checkpoints.number_kinds import is_whole
from merging.checkpoints.source import CheckpointSource

_PREDICTING = ("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers", "mtp_num_layers")
_BY_RIGHT = re.compile(  # last part of a name: what packed weights leave behind, and masks of pretraining
    r".*(_scale|scales|zero|quant|absmax|nested|_state|g_idx|SCB).*|masked_bias|mask_token"
)


class Unmade(NamedTuple):
    """`certain`: the config takes away what the weights have: modules at the end of a list, a bias.
    `doubtful`: the class has no such tensor where this one lies, whatever the reason."""

    certain: tuple[str, ...]
    doubtful: tuple[str, ...]


def unmade(model: nn.Module, names: NameMap, base: CheckpointSource, passes: Callable[[str], bool]) -> Unmade:
    """Which tensors of `base` no module of `model` takes though they lie among its modules.

    `names`: of the base in `model`. `passes`: stored names that are of no interest here (heads, parts of a
    larger model). Tensors outside of the model's modules, and those that transformers passes over when it
    loads the class, never count. Reads biases alone: such as are all zeros do no harm."""
    lists, parents = _places(names)
    obsolete, doubled = frozenset(names.obsolete), frozenset(names.doubled)
    certain: list[str] = []
    doubtful: list[str] = []
    for name in names.unused:
        if name in obsolete or name in doubled or passes(name) or is_whole(base.spec(name).dtype):
            continue
        if _is_beyond(model, name, lists):
            certain.append(name)
        elif _is_switched_off(model, name, parents):
            (certain if _has_values(base, name) else doubtful).append(name)
        elif _is_inside(model, name, lists, parents) and not _BY_RIGHT.fullmatch(name.rpartition(".")[2]):
            doubtful.append(name)
    return Unmade(tuple(certain), tuple(doubtful))


def _places(names: NameMap) -> tuple[dict[str, str], dict[str, str]]:
    """Lists of modules, and modules that hold tensors: path in the file -> path in the model."""
    lists: dict[str, str] = {}
    parents: dict[str, str] = {}
    for stored, inside in (*names.renamed.items(), *names.converted.items()):
        path, _, leaf = stored.rpartition(".")
        module, _, inner = inside.rpartition(".")
        if leaf == inner:
            parents.setdefault(path, module)
        ours, theirs = list(_numbered(stored)), list(_numbered(inside))
        if [number for _, number in ours] == [number for _, number in theirs]:
            lists.update((one, other) for (one, _), (other, _) in zip(ours, theirs, strict=True))
    return lists, parents


def _numbered(name: str) -> Iterator[tuple[str, int]]:
    """For each number in a name, what stands before it, and the number."""
    parts = name.split(".")
    for place, part in enumerate(parts[:-1]):
        if part.isdecimal():
            yield ".".join(parts[:place]), int(part)


def _is_beyond(model: nn.Module, name: str, lists: dict[str, str]) -> bool:
    """Whether it is of a module after the last of its list. Layers that predict further tokens lie there,
    too, in some checkpoints, by their own field of the config."""
    for path, number in _numbered(name):
        made = _numbers(model, lists[path]) if path in lists else []
        if made and number > max(made):
            return number > max(made) + _predicting(model)
    return False


def _numbers(model: nn.Module, path: str) -> list[int]:
    try:
        children: Iterable[str] = model.get_submodule(path)._modules
    except AttributeError:
        return []
    return [int(child) for child in children if child.isdecimal()]


def _predicting(model: nn.Module) -> int:
    config = getattr(model, "config", None)
    inner = getattr(config, "get_text_config", lambda: None)()
    told = [getattr(one, field, None) for one in (config, inner) for field in _PREDICTING]
    return max((value for value in told if isinstance(value, int)), default=0)


def _owner(model: nn.Module, name: str, parents: dict[str, str]) -> nn.Module | None:
    """The module that has other tensors of the path."""
    path = parents.get(name.rpartition(".")[0])
    try:
        return None if path is None else model.get_submodule(path)
    except AttributeError:
        return None


def _is_switched_off(model: nn.Module, name: str, parents: dict[str, str]) -> bool:
    """Whether a module has a place for it that the config leaves empty, as `bias=False` does."""
    owner, leaf = _owner(model, name, parents), name.rpartition(".")[2]
    return owner is not None and leaf in owner._parameters and owner._parameters[leaf] is None


def _has_values(base: CheckpointSource, name: str) -> bool:
    return len(base.spec(name).shape) > 1 or bool(base.read(name).any())


def _is_inside(model: nn.Module, name: str, lists: dict[str, str], parents: dict[str, str]) -> bool:
    """Whether it lies in a module of a list, or beside tensors of a module below the model itself; buffers
    that the class computes do not count."""
    owner, leaf = _owner(model, name, parents), name.rpartition(".")[2]
    if owner is not None and leaf in owner._buffers:
        return False
    if owner is not None and owner is not model:
        return True
    return any(path in lists for path, _ in _numbered(name))
