"""Names in an adapter's file: which tensors are factors of which module, which replace a whole tensor."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from merging.errors import CheckpointError, Problem

_PREFIX = "base_model.model."
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
    """`targets` by module; `whole`: tensor of the model -> name in the file of what replaces it."""

    targets: dict[str, Target] = field(default_factory=dict)
    whole: dict[str, str] = field(default_factory=dict)


def sorted_keys(names: Iterable[str], label: str) -> Keys:
    """Raises CheckpointError for factors without their counterpart and for names of unknown kind."""
    keys, problems = Keys(), []
    adapters: set[str] = set()
    for name in names:
        plain = name.removeprefix(_PREFIX)
        if ".original_module." in plain:
            continue  # the module that a saved one stands for
        if ".lora_" not in plain:
            keys.whole.setdefault(_LAYER.sub("", _SAVED.sub("", plain)), name)
            continue
        match = _PART.fullmatch(plain)
        if match is None:
            problems.append(Problem(f"{label}: {name}", "is a tensor of unknown kind"))
            continue
        adapters.add(match["adapter"] or "default")
        _add(keys, _LAYER.sub("", match["module"]), match, name)
    for module, target in keys.targets.items():
        if not (target.first and target.second):
            has, lacks = ("lora_A", "lora_B") if target.first else ("lora_B", "lora_A")
            problems.append(Problem(f"{label}: {module}", f"has {has} and no {lacks}"))
    if len(adapters) > 1:
        problems.append(Problem(label, f"the file holds several adapters: {', '.join(sorted(adapters))}"))
    if problems:
        raise CheckpointError(f"{label} cannot be read as a LoRA", problems=problems[:10])
    return keys


def _add(keys: Keys, module: str, match: re.Match[str], name: str) -> None:
    target = keys.targets.setdefault(module, Target(module))
    part = match["part"]
    if part == "magnitude_vector":
        target.magnitude = name
    elif match["leaf"] == "bias":
        target.bias = name
    elif part.endswith("A"):
        target.first = name
    else:
        target.second = name
    target.embedding |= part.startswith("embedding")
    if match["module"].endswith(".base_layer.out_proj"):
        # PEFT (0.21) merges the out_proj of a fused attention twice, in its forward too: so it was trained.
        target.times = 2
