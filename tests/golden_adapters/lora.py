"""KnOTS and Core Space, on adapters read as PEFT stores them; the references' change is B A, so alpha = r."""

from __future__ import annotations

from typing import Any

from torch import Tensor

import merging
from golden_adapters.expressing import NotExpressible, named, refuse_unknown, resolve
from golden_adapters.ties import share
from merging.checkpoints.lora import LoraSource
from merging.checkpoints.lora_config import LoraConfig
from merging.checkpoints.source import CheckpointSource, StateDictSource

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
    merged = merging.merge(
        "knots",
        inputs["base"],
        adapters(inputs),
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
    merged = merging.merge(
        "core_space",
        inputs["base"],
        adapters(inputs),
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


def adapters(inputs: dict[str, Any]) -> dict[str, CheckpointSource]:
    base = StateDictSource(inputs["base"], "base")
    return {task: adapter(base, factors, task) for task, factors in named(inputs["loras"]).items()}


def adapter(base: CheckpointSource, factors: State, task: str) -> LoraSource:
    """Ranks may differ from weight to weight; alpha is the rank everywhere."""
    ranks = {
        name.split(".lora_A")[0]: tensor.shape[0] for name, tensor in factors.items() if ".lora_A" in name
    }
    config = LoraConfig(rank_pattern=ranks, alpha_pattern={name: float(rank) for name, rank in ranks.items()})
    return LoraSource(base, StateDictSource(factors, task), config, label=f'expert "{task}"')


ADAPTERS = {"knots": knots, "core_space": core_space}
