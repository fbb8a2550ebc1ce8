"""Whether an adapter's file has what its config speaks of: what was lost, and what is said in vain."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from merging.checkpoints.lora_config import LoraConfig
from merging.checkpoints.lora_keys import Keys
from merging.checkpoints.module_patterns import ModulePatterns
from merging.errors import CheckpointError, Problem
from merging.spec.wording import counted, shortened

_PREFIX = "base_model.model."
_LEAVES = (".weight", ".in_proj_weight")
_ADDED = frozenset({"classifier", "score", "qa_outputs"})  # PEFT lists heads that a model need not have
_SHOWN = 5  # names of one kind
_REMEDY = "Get the adapter again, all of it: without these tensors the result is another model."

Matches = Callable[[str], bool]


def refuse_lost(
    keys: Keys,
    config: LoraConfig,
    label: str,
    *,
    placed: Mapping[str, str],
    base: Mapping[str, tuple[str, int]],
    tied: Callable[[str], Iterable[str]],
) -> tuple[str, ...]:
    """Notes on what the config says in vain. Raises CheckpointError where the file lacks what PEFT has saved.

    `placed`: adapted module -> its tensor in the base. `base`: tensor -> its name in the model, and how many
    axes it has. `tied`: other names in the model of a tensor.
    """
    problems = _lost_saved(keys, config, label, base, tied) + _lost_factors(keys, config, label, placed, base)
    if problems:
        raise CheckpointError(
            f"{label} lacks tensors that its adapter_config.json names", problems=problems, remedy=_REMEDY
        )
    return _in_vain(keys, config, label)


def _lost_saved(
    keys: Keys,
    config: LoraConfig,
    label: str,
    base: Mapping[str, tuple[str, int]],
    tied: Callable[[str], Iterable[str]],
) -> list[Problem]:
    """Modules to save of which the file has nothing, where the base has such, or nobody else lists them."""
    problems = []
    for module in _saved(config):
        if any(_inside(module, place) for place in keys.whole):
            continue
        theirs = [place for _, (place, _) in base.items() if _inside(module, place)]
        shared = [place for _, (start, _) in base.items() for place in tied(start) if _inside(module, place)]
        if shared and not theirs and keys.whole:  # the tensor that it shares may be what was saved
            continue
        if not (theirs or shared) and (module in _ADDED or keys.whole):
            continue
        example = (theirs or shared or [f"{module}.weight"])[0]
        what = f'names "{shortened(module)}", and the file has no tensor of it, expected "{_PREFIX}{example}"'
        problems.append(Problem(f"{label}: modules_to_save", what))
    return problems


def _lost_factors(
    keys: Keys,
    config: LoraConfig,
    label: str,
    placed: Mapping[str, str],
    base: Mapping[str, tuple[str, int]],
) -> list[Problem]:
    """Modules without factors, in layers of which others have some, that PEFT would have adapted."""
    wanted = _targeted(config)
    if wanted is None:
        return []
    stacks = {_stack(base[name][0]) for name in placed.values() if name in base} - {""}
    here = {base[name][0].rpartition(".")[0] for name in placed.values() if name in base}
    lost = []
    for name, (place, axes) in base.items():
        module = next((place.removesuffix(leaf) for leaf in _LEAVES if place.endswith(leaf)), "")
        if axes < 2 or not module or module in here or _stack(place) not in stacks or not wanted(module):
            continue
        if not here.isdisjoint(_ancestors(module)):  # of a fused attention, which PEFT takes as one
            continue
        if place not in keys.whole and name not in keys.whole:
            lost.append(module)
    if not lost:
        return []
    shown = ", ".join(f'"{_PREFIX}{module}.lora_A.weight"' for module in lost[:_SHOWN])
    more = f", ... of {len(lost)} modules" if len(lost) > _SHOWN else ""
    targets = shortened(str(_field(config, "target_modules")))
    what = f"{targets} takes in modules of which the file has no factors, expected {shown}{more}"
    return [Problem(f"{label}: target_modules", what)]


def _targeted(config: LoraConfig) -> Matches | None:
    """PEFT's choice of modules; None where this cannot say it for certain."""
    targets, excluded = _field(config, "target_modules"), _field(config, "exclude_modules")
    takes = _matching(targets)
    if takes is None or targets == "all-linear" or (isinstance(excluded, str) and excluded):
        return None
    without = _names(excluded)
    saved = _saved(config)
    in_layers = _in_layers(config) if not isinstance(targets, str) else None
    exact = frozenset(_names(targets))

    def wanted(module: str) -> bool:
        if not takes(module) or any(_inside(one, f"{module}.") for one in saved):
            return False
        if any(_ends(module, one) or _ends(one, module) for one in without):
            return False
        return in_layers is None or module in exact or in_layers(module)

    return wanted


def _matching(targets: Any, *, unsure: bool = False) -> Matches | None:
    """PEFT's test of a module's name; None where there is none, or none that can be used. `unsure`: its
    answer on a name that the pattern takes too long for."""
    if isinstance(targets, str):
        if not targets:
            return None
        try:
            patterns = ModulePatterns({targets: True}, "target_modules")
            whole = re.compile(targets)
        except (CheckpointError, re.error):
            return None

        def fits(module: str) -> bool:
            try:  # the first refuses what the second would take for ever to match
                return bool(patterns.value(module, False) and whole.fullmatch(module))
            except CheckpointError:
                return unsure

        return fits
    names = frozenset(_names(targets))
    return (lambda module: not names.isdisjoint(_endings(module))) if names else None


def _in_layers(config: LoraConfig) -> Matches | None:
    """Whether a module lies in `layers_to_transform`, by PEFT's rule; None where that is not used."""
    found = _field(config, "layers_to_transform")
    layers = {found} if isinstance(found, int) else set(found) if isinstance(found, list) else set()
    if not layers:
        return None
    given = _field(config, "layers_pattern")
    patterns = (given,) if isinstance(given, str) and given else _names(given)

    def inside(module: str) -> bool:
        parts = module.split(".")
        for place in range(1, len(parts) - 1):
            named = parts[place - 1] in patterns if patterns else place > 1
            if named and parts[place].isdigit():
                return int(parts[place]) in layers
        return False

    return inside


def _in_vain(keys: Keys, config: LoraConfig, label: str) -> tuple[str, ...]:
    notes = []
    modules = sorted(keys.targets)
    for field in ("rank_pattern", "alpha_pattern"):
        values = getattr(config, field)
        patterns = ModulePatterns({pattern: index for index, pattern in enumerate(values)}, field)
        used = {patterns.value(module, None) for module in modules} if values else set()
        idle = [pattern for index, pattern in enumerate(values) if index not in used]
        if idle:
            notes.append(
                f"{label}: {len(idle)} of {len(values)} patterns in {field} decide for no module that the "
                f'file has factors of (first: "{shortened(idle[0])}"): see that they are not misspelt'
            )
    if config.lora_bias:
        without = [
            module for module in modules if not (keys.targets[module].bias or keys.targets[module].embedding)
        ]
        if without:
            notes.append(
                f"{label}: lora_bias is set, and {len(without)} of {len(modules)} modules have no "
                f"lora_B.bias in the file (first: {without[0]}): nothing is added to their biases"
            )
    for field, takes in _choices(config):
        outside = [module for module in modules if not takes(module)]
        if outside:
            notes.append(
                f"{label}: {field} is {shortened(str(_field(config, field)))}, and the file has factors of "
                f"{counted(len(outside), 'module')} that it leaves out (first: {outside[0]}); all are "
                "merged, where PEFT would leave these out"
            )
            modules = [module for module in modules if takes(module)]
    return tuple(notes)


def _choices(config: LoraConfig) -> Iterator[tuple[str, Matches]]:
    """Field -> which modules PEFT adapts by it; where that can be said for certain."""
    targets, excluded = _field(config, "target_modules"), _field(config, "exclude_modules")
    drops = _matching(excluded)
    if drops is not None:
        yield "exclude_modules", lambda module: not drops(module)
    takes = None if targets == "all-linear" else _matching(targets, unsure=True)
    if takes is not None and not _field(config, "target_parameters"):
        yield "target_modules", takes
    inside = _in_layers(config)
    if inside is not None and isinstance(targets, list):
        exact = frozenset(_names(targets))
        yield "layers_to_transform", lambda module: module in exact or inside(module)


def _saved(config: LoraConfig) -> tuple[str, ...]:
    return tuple(name.removeprefix(_PREFIX) for name in _names(_field(config, "modules_to_save")))


def _field(config: LoraConfig, name: str) -> Any:
    return (config.model_extra or {}).get(name)


def _names(value: Any) -> tuple[str, ...]:
    return tuple(one for one in value if isinstance(one, str) and one) if isinstance(value, list) else ()


def _inside(module: str, place: str) -> bool:
    """Whether a tensor's name is that of one in a module of this name."""
    return f".{module}." in f".{place}"


def _ends(name: str, end: str) -> bool:
    return name == end or name.endswith(f".{end}")


def _endings(module: str) -> list[str]:
    return [module, *(module[dot.end() :] for dot in re.finditer(r"\.", module))]


def _ancestors(module: str) -> list[str]:
    return [module[: dot.start()] for dot in re.finditer(r"\.", module)]


def _stack(place: str) -> str:
    """The numbered layers that a tensor lies in: model.layers.#; "" outside of such."""
    parts = place.split(".")
    last = max((index for index, part in enumerate(parts) if part.isdigit()), default=-1)
    return ".".join("#" if part.isdigit() else part for part in parts[: last + 1])
