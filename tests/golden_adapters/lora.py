"""KnOTS and Core Space, on adapters that PEFT has saved; the references' change is B A, so the scale is 1."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import peft
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import merging
from golden_adapters.expressing import NotExpressible, named, refuse_unknown, resolve
from golden_adapters.ties import share
from merging.checkpoints.lora import open_adapter
from merging.checkpoints.safetensors import SafetensorsSource
from merging.checkpoints.source import CheckpointSource

State = dict[str, Tensor]


def knots(case: dict[str, Any], tensors: dict[str, Tensor]) -> dict[str, Any]:
    params, inputs = case["params"], resolve(case["inputs"], tensors)
    refuse_unknown(
        params,
        "merge_method",
        "merging_type",
        "topK",
        "scaling",
        "concat_across_output",
        "singular_value_floor",
        "isotropize",
    )
    if params.get("isotropize"):
        raise NotExpressible("knots does not make its result isotropic")
    with adapters(inputs) as experts:
        merged = merging.merge(
            "knots",
            inputs["base"],
            experts,
            scale=params["scaling"],
            inner=inner(params),
            concat="inputs" if params.get("concat_across_output", True) else "outputs",
            floor=params.get("singular_value_floor", 1e-5),
        )
    return {"merged": merged}


def core_space(case: dict[str, Any], tensors: dict[str, Tensor]) -> dict[str, Any]:
    params, inputs = case["params"], resolve(case["inputs"], tensors)
    refuse_unknown(params, "merge_space", "merge_method", "merging_type", "topK", "isotropize", "scaling")
    if params.get("merge_space", "core") != "core":
        raise NotExpressible(f'core_space merges cores, not in the space "{params["merge_space"]}"')
    with adapters(inputs) as experts:
        merged = merging.merge(
            "core_space",
            inputs["base"],
            experts,
            scale=params["scaling"],
            inner=inner(params),
            isotropize=params.get("isotropize", False),
        )
    return {"merged": merged}


def inner(params: dict[str, Any]) -> dict[str, Any]:
    """The inner rule in our words. `tv` sums or, with merging_type, takes the mean."""
    method, how = params["merge_method"], params.get("merging_type")
    if method == "ties":
        return {"type": "ties", "density": share(params.get("topK", 10)), "merge": how or "mean"}
    if method == "tsv":
        return {"type": "tsv_m"}
    if method == "mean" or (method == "tv" and how == "mean"):
        return {"type": "average"}
    if method in ("tv", "sum"):
        return {"type": "task_arithmetic", "scale": 1.0}
    raise NotExpressible(f'no translation for the method "{method}"')


@contextmanager
def adapters(inputs: dict[str, Any]) -> Iterator[dict[str, CheckpointSource]]:
    """Folders that PEFT writes, opened on a base that lies in a file."""
    with TemporaryDirectory() as name:
        folder, opened = Path(name), {}
        save_file(inputs["base"], folder / "base.safetensors")
        base = SafetensorsSource(folder / "base.safetensors", "base")
        for task, factors in named(inputs["loras"]).items():
            write_adapter(inputs["base"], factors, folder / task)
            opened[task] = open_adapter(folder / task, base, None, f'expert "{task}"')
        yield opened


def write_adapter(base: State, factors: State, folder: Path) -> None:
    """Saved by PEFT with these factors, at twice the scale and half of each B: both are exact."""
    ranks = {
        name.split(".lora_A")[0]: tensor.shape[0] for name, tensor in factors.items() if ".lora_A" in name
    }
    layers = {name.removesuffix(".weight"): nn.Linear(*weight_OI.T.shape) for name, weight_OI in base.items()}
    doubled = {name: 2 * rank for name, rank in ranks.items()}
    config = peft.LoraConfig(target_modules=list(ranks), rank_pattern=ranks, alpha_pattern=doubled)
    wrapped = peft.get_peft_model(nn.ModuleDict(layers), config)
    parameters = {
        name.removeprefix("base_model.model."): parameter
        for name, parameter in wrapped.named_parameters()
        if parameter.requires_grad
    }
    assert parameters.keys() == factors.keys()
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(factors[name] / 2 if ".lora_B" in name else factors[name])
    wrapped.save_pretrained(folder)


ADAPTERS = {"knots": knots, "core_space": core_space}
