"""Names in an adapter's file: which tensors are factors of which module, which replace a whole tensor."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from merging.errors import CheckpointError, Problem

_PREFIX = "base_model.model."
_REMEDY = (
    "Save the adapter again with PEFT's save_pretrained, which gives every tensor one name of the form "
    '"base_model.model.MODULE.lora_A.weight".'
)
_PART = re.compile(
    r"(?P<module>.+)\.lora_(?P<part>A|B|embedding_A|embedding_B|magnitude_vector)"
    r"(?:\.(?!weight$|bias$)(?P<adapter>[^.]+))?(?:\.(?P<leaf>weight|bias))?"
)
_SAVED = re.compile(r"\.modules_to_save(\.default)?(?=\.)")
_LAYER = re.compile(r"\.base_layer(?=\.)")


@dataclass
class Target:
    """One adapted module, and the names of its tensors in the adapter's file."""

    module: str
    first: str = ""  # A
    second: str = ""  # B
    embedding: bool = False
    bias: str = ""  # of B, with lora_bias
    magnitude: str = ""  # with use_dora
    times: int = 1  # how often PEFT adds it

    @property
    def keys(self) -> list[str]:
        return [key for key in (self.first, self.second, self.bias, self.magnitude) if key]


@dataclass
class Keys:
    """`targets` by module; `whole`: tensor of the model -> name in the file of what replaces it.

    `twins`: two names in the file, and their tensor of the model. PEFT (0.21) writes a saved module's bias
    twice with `bias` "all", and equal; two that differ contradict each other.
    """

    targets: dict[str, Target] = field(default_factory=dict)
    whole: dict[str, str] = field(default_factory=dict)
    twins: list[tuple[str, str, str]] = field(default_factory=list)


def sorted_keys(names: Iterable[str], label: str) -> Keys:
    """Raises CheckpointError for factors without their counterpart, for names of unknown kind, and for two
    tensors of one meaning."""
    keys, problems = Keys(), []
    adapters: set[str] = set()
    replaced: list[tuple[str, str]] = []
    for name in names:
        plain = name.removeprefix(_PREFIX)
        if ".lora_" not in plain:
            if ".original_module." in plain:  # the module that a saved one stands for
                replaced.append((plain.replace(".original_module.", ".", 1), name))
                continue
            place = _LAYER.sub("", _SAVED.sub("", plain))
            other = keys.whole.setdefault(place, name)
            if bool(_SAVED.search(name)) != bool(_SAVED.search(other)):
                keys.twins.append((name, other, place))
            else:
                problems += _repeated(label, name, other, place)
            continue
        match = _PART.fullmatch(plain)
        if match is None or (match["leaf"] == "bias" and match["part"] != "B"):
            problems.append(Problem(f"{label}: {name}", "is a tensor of unknown kind"))
            continue
        adapters.add(match["adapter"] or "default")
        module = _LAYER.sub("", match["module"])
        problems += _repeated(label, name, _add(keys, module, match, name), module)
    for place, name in replaced:
        if place not in keys.whole:
            what = f'is of a module that another replaces, and the file has no "{place}" that replaces it'
            problems.append(Problem(f"{label}: {name}", what))
    for module, target in keys.targets.items():
        if not (target.first and target.second):
            has, lacks = ("lora_A", "lora_B") if target.first else ("lora_B", "lora_A")
            problems.append(Problem(f"{label}: {module}", f"has {has} and no {lacks}"))
    if len(adapters) > 1:
        problems.append(Problem(label, f"the file holds several adapters: {', '.join(sorted(adapters))}"))
    if problems:
        raise CheckpointError(f"{label} cannot be read as a LoRA", problems=problems[:10], remedy=_REMEDY)
    return keys


def beside_factors(key: str) -> bool:
    """Whether a tensor of the file is that of an adapted layer itself, as PEFT stores embeddings."""
    return bool(_LAYER.search(key))


def _repeated(label: str, name: str, other: str, place: str) -> list[Problem]:
    if name == other:
        return []
    return [Problem(f"{label}: {name}", f'and "{other}" are both given for "{place}", expected one of them')]


def _add(keys: Keys, module: str, match: re.Match[str], name: str) -> str:
    """The name that counts: this one, or one that has its place already."""
    target = keys.targets.setdefault(module, Target(module))
    part = match["part"]
    if part == "magnitude_vector":
        name = target.magnitude = target.magnitude or name
    elif match["leaf"] == "bias":
        name = target.bias = target.bias or name
    elif part.endswith("A"):
        name = target.first = target.first or name
    else:
        name = target.second = target.second or name
    target.embedding |= part.startswith("embedding")
    if match["module"].endswith(".base_layer.out_proj"):
        # PEFT (0.21) merges the out_proj of a fused attention twice, in its forward too: so it was trained.
        target.times = 2
    return name
