"""How a changed tensor is said in a PEFT adapter: as factors, as a bias, or in a module saved whole."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

from merging.checkpoints.outline import Outline
from merging.errors import CheckpointError, Problem, SpecError
from merging.libraries import reading_with

PREFIX = "base_model.model."  # before all names in an adapter
Role = Literal["factors", "bias", "whole"]


def outline_of(folder: Path, stored: Iterable[str]) -> Outline:
    """Of the model class that the base's config names, for which adapters are loaded, its head too, and these
    tensors. Raises SpecError without one."""
    from merging.backbones.transformers import AnyTransformers
    from merging.checkpoints.config_bounds import refuse_unbounded
    from merging.checkpoints.folder import config as read_config
    from merging.checkpoints.lora_experts import outline_for_peft

    found = read_config(folder)
    if found is None or "model_type" not in found:
        raise SpecError(
            f'output.form "lora" needs a base of transformers, and {folder} has no config that says which',
            remedy='Use "form": "model".',
        )
    from transformers import AutoConfig

    place = folder if folder.is_dir() else folder.parent
    refuse_unbounded(place / "config.json", found, folder)
    with reading_with(CheckpointError, f"the config of {place} cannot be used"):
        config = AutoConfig.from_pretrained(place, local_files_only=True, trust_remote_code=False)
    return outline_for_peft(AnyTransformers(config, folder=folder).whole(), stored)


class Roles:
    """What PEFT can do for each tensor of the base, by the modules of the base's class."""

    def __init__(self, outline: Outline) -> None:
        self._outline, self._modules = outline, outline.modules
        self.places = outline.places  # stored name -> name in the module
        self._stored = {place: name for name, place in self.places.items()}

    def of(self, name: str) -> Role | None:
        """None for a tensor that has no place in the module."""
        place = self.places.get(name)
        if place is None:
            return None
        owner, _, leaf = place.rpartition(".")
        tied = len(self._outline.tied(place)) > 1
        if leaf == "weight" and not tied and self._modules[owner] in ("linear", "conv1d", "expert"):
            return "factors"
        return "bias" if leaf == "bias" else "whole"

    def unsaid(self, name: str) -> str:
        """Why a tensor that has changed has no role."""
        if name in self._outline.fused:
            return (
                "has changed, and is a part of a larger tensor in the model that the config names, of which "
                "PEFT takes no factors for parts"
            )
        return "has changed and has no place in the model that the config names"

    def stacked(self, factored: Iterable[str]) -> list[str]:
        """All experts' linears that lie in one stack with some of these: PEFT fills stacks whole."""
        owners = {_stack(self.module(name)) for name in factored if self._is_expert(name)}
        return [name for name in self.places if self._is_expert(name) and _stack(self.module(name)) in owners]

    def _is_expert(self, name: str) -> bool:
        return self._modules.get(self.module(name)) == "expert" and name.endswith(".weight")

    def transposed(self, name: str) -> bool:
        """Whether inputs come first, as in GPT-2."""
        return self._modules[self.module(name)] == "conv1d"

    def module(self, name: str) -> str:
        return self.places[name].rpartition(".")[0]

    def saved(self, whole: Iterable[str], factored: Iterable[str]) -> dict[str, list[str]]:
        """Modules to save for these tensors -> all their tensors, in the module's names.

        Raises CheckpointError where one of them holds a layer that has factors.
        """
        wanted: set[str] = set()
        for name in whole:
            for place in self._outline.tied(self.places[name]):
                wanted.add(place.rpartition(".")[0])
        outer = sorted(
            m for m in wanted if m and not any(m.startswith(f"{other}.") for other in wanted if other)
        )
        inside = {place: module for module in outer for place in self._outline.tensors(module)}
        problems = [
            Problem(name, "lies directly in the model, not in a module that could be saved")
            for name in whole
            if not self.module(name)
        ]
        problems += [
            Problem(
                self.places[name],
                f'gets factors, and lies in "{inside[self.places[name]]}", which is to be saved whole',
            )
            for name in factored
            if self.places[name] in inside
        ]
        if problems:
            raise CheckpointError(
                "the merged model cannot be said as an adapter on the base",
                problems=problems,
                remedy='Use "form": "model".',
            )
        return {module: self._outline.tensors(module) for module in outer}

    def source(self, place: str) -> str | None:
        """The stored tensor that fills a place of the module, itself or by a tie."""
        for alias in (place, *sorted(self._outline.tied(place))):
            if alias in self._stored:
                return self._stored[alias]
        return None

    def listed(self, modules: Iterable[str]) -> list[str]:
        """PEFT's modules_to_save for exactly these: it takes all modules whose names end with one of them."""
        return [
            f"{PREFIX}{module}"
            if any(other.endswith(module) for other in self._modules if other != module)
            else module
            for module in sorted(modules)
        ]

    def targets(self, modules: Iterable[str]) -> list[str] | str:
        """PEFT's target_modules for exactly these: whole names, or a pattern where one ends another name."""
        listed = sorted(modules)
        ends = tuple(f".{module}" for module in listed)
        if ends and any(module.endswith(ends) for module in self._modules):
            return f"({'|'.join(map(re.escape, listed))})"
        return listed


def _stack(module: str) -> str:
    """`mlp.experts` of `mlp.experts.3.up_proj`."""
    return module.rsplit(".", 2)[0]


def adapter_config(
    outline: Outline,
    ranks: Mapping[str, int],
    targets: list[str] | str,
    saved: list[str],
    *,
    rank: int | None,
    biases: bool,
    transposed: bool,
    base_name: str,
    revision: str | None,
) -> dict[str, Any]:
    """adapter_config.json. `ranks` by module; alpha equals the rank everywhere, so that the scale is 1.
    `rank`: the adapter's own, from which patterns differ; None: the most frequent."""
    values = list(ranks.values())
    if rank is None:
        rank = max(set(values), key=lambda value: (values.count(value), value)) if values else 1
    others = {f"^{re.escape(module)}": found for module, found in sorted(ranks.items()) if found != rank}
    return {
        "auto_mapping": {"base_model_class": outline.name, "parent_library": outline.library},
        "base_model_name_or_path": base_name,
        "bias": "all" if biases else "none",
        "fan_in_fan_out": transposed,
        "inference_mode": True,
        "init_lora_weights": True,
        "lora_alpha": rank,
        "lora_dropout": 0.0,
        "alpha_pattern": others,
        "modules_to_save": saved or None,
        "peft_type": "LORA",
        "r": rank,
        "rank_pattern": others,
        "revision": revision,
        "target_modules": targets,
        "task_type": "CAUSAL_LM" if outline.name.endswith("ForCausalLM") else None,
        "use_dora": False,
        "use_rslora": False,
    }
