"""TSV-M, ISO-C, ISO-CTS and WUDI. What is recorded are merged task vectors: ours around a base of zeros."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

import merging
from golden_adapters.expressing import NotExpressible, named, refuse_unknown, resolve

Case = dict[str, Any]
Tensors = dict[str, Tensor]


def tsv_m(case: Case, tensors: Tensors) -> dict[str, Any]:
    refuse_unknown(case["params"], "alpha", "sv_reduction")
    share = Fraction(case["params"].get("sv_reduction", f"1/{len(case['inputs']['task_vectors'])}"))
    published = share == Fraction(1, len(case["inputs"]["task_vectors"]))
    return merged("tsv_m", case, tensors, share=None if published else float(share))


def iso_c(case: Case, tensors: Tensors) -> dict[str, Any]:
    refuse_unknown(case["params"], "alpha")
    return merged("iso_c", case, tensors)


def iso_cts(case: Case, tensors: Tensors) -> dict[str, Any]:
    refuse_unknown(case["params"], "alpha", "common_space_fraction")
    return merged("iso_cts", case, tensors, common=case["params"].get("common_space_fraction", 0.8))


def wudi(case: Case, tensors: Tensors) -> dict[str, Any]:
    params = case["params"]
    refuse_unknown(params, "iter_num", "lr", "optimizer", "init", "alpha")
    if not params.get("optimizer", "Adam(").startswith("Adam(betas 0.9/0.999, eps 1e-8, no weight decay"):
        raise NotExpressible(f'WUDI steps with plain Adam, not with "{params["optimizer"]}"')
    if params.get("init", "sum of task vectors") != "sum of task vectors":
        raise NotExpressible(f'WUDI starts from the sum of the task vectors, not from "{params["init"]}"')
    return merged(
        "wudi",
        case,
        tensors,
        steps=params["iter_num"],
        learning_rate=params["lr"],
        others="mean",
        skip=[],
    )


def merged(rule: str, case: Case, tensors: Tensors, **settings: Any) -> dict[str, Any]:
    """The merged task vector, before alpha, in float64 of the float32 task vectors as recorded."""
    vectors = resolve(case["inputs"]["task_vectors"], tensors)
    wide = [{name: tensor.double() for name, tensor in vector.items()} for vector in vectors]
    base = {name: torch.zeros_like(tensor) for name, tensor in wide[0].items()}
    found = merging.merge(rule, base, named(wide), **settings)
    return dict.fromkeys(case["outputs"], found)


ADAPTERS = {"tsv_m": tsv_m, "iso_c": iso_c, "iso_cts": iso_cts, "wudi": wudi}
