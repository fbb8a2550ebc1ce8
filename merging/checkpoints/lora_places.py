"""Where an adapter's tensors belong in its base: by the base's own names, and by the shapes."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from torch import nn

from merging.checkpoints.lora_config import FOLD, LoraConfig
from merging.checkpoints.lora_keys import Keys, Target, beside_factors
from merging.checkpoints.lora_lost import refuse_lost
from merging.checkpoints.names import module_names
from merging.checkpoints.outline import Kind, Outline
from merging.checkpoints.source import CheckpointSource
from merging.errors import CheckpointError, Problem

_SHOWN = 10  # problems of one adapter
_UNTIE = "Untie the base (tie_word_embeddings: false, both tensors stored)"


@dataclass(frozen=True)
class Change:
    """What is done to one tensor of the base; names are those of the adapter's file.

    `transposed`: the base stores the matrix as inputs x outputs. `magnitude`: DoRA's lengths. A `bias` has no
    factors and is added.
    """

    scale: float
    first: str = ""
    second: str = ""
    transposed: bool = False
    magnitude: str = ""
    bias: str = ""


class Placement(NamedTuple):
    """By the base's names; `whole`: name -> that in the adapter's file, where the base lacks it the same."""

    changes: Mapping[str, Change]
    whole: Mapping[str, str]
    notes: tuple[str, ...]


def placed(
    base: CheckpointSource,
    tensors: CheckpointSource,
    keys: Keys,
    config: LoraConfig,
    model: nn.Module | Outline | None,
) -> Placement:
    """Where all of an adapter goes. `model`: the base's class; an outline of it is for adapters that use its
    names, as those do that this package writes.

    Raises CheckpointError unless every factor has its place and fits it.
    """
    outside = _Places(base, model, list(keys.whole))
    whole: dict[str, str] = {}
    problems: list[Problem] = []
    for place, key in keys.whole.items():
        found = outside.find(place) or place
        problems += _taken(tensors.label, key, whole.setdefault(found, key), found)
    for key, other, place in keys.twins:
        if tensors.spec(key) != tensors.spec(other) or not tensors.read(key).equal(tensors.read(other)):
            problems += _taken(tensors.label, key, other, place)

    def shape_of(name: str) -> tuple[int, ...]:
        return (tensors.spec(whole[name]) if name in whole else base.spec(name)).shape

    places = _Places(base, model, [name for target in keys.targets.values() for name in _candidates(target)])
    changes: dict[str, Change] = {}
    notes: list[str] = []
    lost = [target for target in keys.targets.values() if places.weight(target) is None]
    _refuse_lost(lost, keys, base, tensors.label, places)
    for target in keys.targets.values():
        name = places.weight(target)
        assert name is not None
        try:
            change = _change(target, name, shape_of(name), tensors, config, places)
        except CheckpointError as error:
            problems.append(Problem(f"{tensors.label}: {target.module}", error.message, error.remedy))
            continue
        problems += _taken(tensors.label, target.first, changes.setdefault(name, change).first, name)
        if target.bias:
            bias = places.find(f"{target.module}.bias")
            if bias is None:
                what = "has a bias (lora_bias), its layer in the base has none"
                problems.append(Problem(f"{tensors.label}: {target.module}", what, FOLD))
            else:
                changes[bias] = Change(change.scale, bias=target.bias)
        notes += _notes(target, name, tensors.label, places)
    if problems:
        if len(problems) > _SHOWN:
            problems[_SHOWN:] = [Problem("", f"and {len(problems) - _SHOWN} more")]
        raise CheckpointError(
            f"{tensors.label} does not fit the base",
            problems=problems,
            remedy="Use the base, the adapter_config.json and the weights of one training together.",
        )
    _refuse_untied(keys, tensors.label, outside)
    notes += refuse_lost(
        keys,
        config,
        tensors.label,
        placed={module: places.weight(target) or "" for module, target in keys.targets.items()},
        base={
            name: (places.place(name), len(base.spec(name).shape))
            for name in base.names()
            if places.is_loaded(name)
        },
        tied=places.others,
    )
    return Placement(changes, whole, tuple(notes))


def _taken(label: str, key: str, other: str, name: str) -> list[Problem]:
    """Two of an adapter's names, an older and a newer one say, for one tensor of the base."""
    if key == other:
        return []
    return [Problem(f"{label}: {key}", f'and "{other}" are both given for "{name}", expected one tensor')]


def _candidates(target: Target) -> list[str]:
    """Tensors that the factors may belong to: a layer's weight, or the fused projection of an attention."""
    return [f"{target.module}.{leaf}" for leaf in ("weight", "in_proj_weight", "bias")]


class _Places:
    """Finds the base's name of a tensor: the same name, else the same place in the model."""

    def __init__(self, base: CheckpointSource, model: nn.Module | Outline | None, names: list[str]) -> None:
        self._stored = frozenset(base.names())
        self._outline = Outline.of(model, base.names()) if isinstance(model, nn.Module) else model
        self._base = {} if self._outline is None else self._outline.places
        self._state = frozenset(() if self._outline is None else self._outline.state)
        self._names = module_names(model, names).renamed if isinstance(model, nn.Module) else {}
        self._by_place = {place: name for name, place in self._base.items()}

    def find(self, name: str) -> str | None:
        return name if name in self._stored else self._by_place.get(self._names.get(name, name))

    def weight(self, target: Target) -> str | None:
        return self.find(f"{target.module}.weight") or self.find(f"{target.module}.in_proj_weight")

    def ties(self, name: str) -> list[str]:
        """Other names of the model for the tensor that is stored under this one, or that it would share."""
        return self.others(self.place(name))

    def others(self, place: str) -> list[str]:
        """Other names of the model for what has this one in it."""
        return [] if self._outline is None else sorted(self._outline.tied(place) - {place})

    def place(self, name: str) -> str:
        """The name in the model of a tensor of the base or of the adapter."""
        return self._base.get(name, self._names.get(name, name))

    def is_loaded(self, name: str) -> bool:
        """Whether the model has the base's tensor: files hold layers beside that no class loads."""
        return self._outline is None or self._base.get(name) in self._state

    def kind(self, name: str) -> Kind | None:
        """What the module is that owns a tensor of the base."""
        place = self._base.get(name)
        if self._outline is None or place is None:
            return None
        return self._outline.modules.get(place.rpartition(".")[0])


def _refuse_lost(lost: list[Target], keys: Keys, base: CheckpointSource, label: str, places: _Places) -> None:
    if not lost:
        return
    shared = [target for target in lost if places.ties(f"{target.module}.weight")]
    if shared:
        other = places.ties(f"{shared[0].module}.weight")[0]
        raise CheckpointError(
            f'{label} adapts "{shared[0].module}", which the base ties to "{other}" and does not store',
            remedy=f"{_UNTIE}, and fold the adapter into that.",
        )
    total = sum(len(target.keys) for target in keys.targets.values())
    found = total - sum(len(target.keys) for target in lost)
    theirs = f"{lost[0].module}.weight"
    raise CheckpointError(
        f"{label}: {found} of {total} adapter tensors match the base",
        problems=[
            Problem("the adapter changes", f"{theirs} (in its file: {lost[0].keys[0]})"),
            Problem("the base has", _nearest(theirs, base.names())),
        ],
        remedy="The adapter was trained on another architecture, or its names were changed.",
    )


def _refuse_untied(keys: Keys, label: str, places: _Places) -> None:
    """One of two tied tensors that was trained alone: PEFT leaves the other as it was.

    What is stored beside factors replaces the tensor that both share, and so both."""
    saved = {places.place(name) for name in keys.whole}
    for name, key in keys.whole.items():
        if beside_factors(key):
            continue
        others = [other for other in places.ties(name) if other not in saved]
        if others:
            raise CheckpointError(
                f'{label} replaces "{name}" alone, which the base ties to "{others[0]}"; its model is untied',
                remedy=f"{_UNTIE}, or fold the adapter with PEFT.",
            )


def _nearest(name: str, names: Iterable[str]) -> str:
    """The name that is most like it among those with the longest common end."""
    parts = name.split(".")
    names = list(names)
    for length in range(min(4, len(parts)), 0, -1):
        ending = f".{'.'.join(parts[-length:])}"
        alike = [other for other in names if f".{other}".endswith(ending)]
        if alike:
            return (difflib.get_close_matches(name, alike[:500], n=1, cutoff=0) or alike)[0]
    return names[0] if names else "no tensors"


def _change(
    target: Target,
    name: str,
    shape: tuple[int, ...],
    tensors: CheckpointSource,
    config: LoraConfig,
    places: _Places,
) -> Change:
    first, second = tensors.spec(target.first).shape, tensors.spec(target.second).shape
    rank, expected = first[0] if first else 0, config.rank(target.module)
    if rank != expected:
        raise CheckpointError(f"its lora_A has {rank} rows, its config says rank {expected}")
    if len(second) < 2 or second[1] != rank or (len(second) > 2 and set(second[2:]) != {1}):
        grouped = "; factors of grouped convolutions are not read" if len(second) > 2 else ""
        raise CheckpointError(f"lora_B is {_shape(second)} and lora_A {_shape(first)}{grouped}", remedy=FOLD)
    plain, turned = (second[0], *first[1:]), (*first[1:], second[0])
    transposed = _is_transposed(target, name, plain, turned, shape, config, places)
    if (turned if transposed else plain) != shape:
        raise CheckpointError(f"its change is {_shape(plain)}, the base's {name} is {_shape(shape)}")
    if config.use_dora and not target.magnitude:
        raise CheckpointError("use_dora is set, and lora_magnitude_vector is missing")
    if target.magnitude and not config.use_dora:
        raise CheckpointError(
            f'use_dora is not set, and the file has "{target.magnitude}", which belongs to use_dora: true',
            remedy="Get adapter_config.json and weights of one training.",
        )
    if target.magnitude and (len(shape) != 2 or target.embedding):
        raise CheckpointError("use_dora on a layer that is not linear is not read", remedy=FOLD)
    if target.magnitude and tensors.spec(target.magnitude).shape != second[:1]:
        found = _shape(tensors.spec(target.magnitude).shape)
        raise CheckpointError(f"lora_magnitude_vector is {found}, the layer has {second[0]} outputs")
    scale = config.scale(target.module) * target.times
    return Change(scale, target.first, target.second, transposed, target.magnitude)


def _is_transposed(
    target: Target,
    name: str,
    plain: tuple[int, ...],
    turned: tuple[int, ...],
    shape: tuple[int, ...],
    config: LoraConfig,
    places: _Places,
) -> bool:
    """Whether the base stores inputs x outputs: by the layer's class, else by shape, else by the config."""
    if target.embedding:
        return True
    kind = places.kind(name)
    if kind in ("linear", "expert", "outputs first"):
        return False
    if kind == "conv1d":
        return True
    return turned == shape if plain != turned else config.fan_in_fan_out and len(shape) == 2


def _notes(target: Target, name: str, label: str, places: _Places) -> list[str]:
    notes = []
    if shared := places.ties(name):
        notes.append(
            f"{label} adapts {target.module}; {', '.join(shared)} shares its tensor, so both change, as with "
            "PEFT's merge_and_unload"
        )
    if target.times > 1:
        notes.append(
            f"{label}: the change of {target.module} counts twice, as in PEFT's own forward and merge"
        )
    return notes


def _shape(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape))
