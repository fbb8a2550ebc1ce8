"""Core Space: what a merge of the cores must be, on adapters which PEFT wrote."""

from __future__ import annotations

import pytest
import torch
from lora_experts import llamas as llamas

import merging

NAME = "model.layers.0.self_attn.q_proj.weight"


def bases(workshop, name):
    """U and V of the stacked factors, B with its scale."""
    terms = [expert.factors(name) for _, expert in sorted(workshop.experts.items())]
    left = torch.linalg.svd(torch.cat([t.left_OR.double() * t.scale for t in terms], 1), full_matrices=False)[
        0
    ]
    right = torch.linalg.svd(torch.cat([t.right_RI.double() for t in terms]), full_matrices=False)[2]
    return left, right


def test_a_plain_sum_of_cores_is_the_plain_sum(llamas):
    inner = {"type": "task_arithmetic", "scale": 1.0}

    merged = merging.merge("core_space", llamas.base, llamas.experts, inner=inner, scale=0.5)

    for name, base_S in llamas.tensors.items():
        wanted = base_S.double() + 0.5 * llamas.deltas(name).sum(0)
        assert torch.allclose(merged[name].double(), wanted, atol=1e-6), name


@pytest.mark.parametrize("inner", [{"type": "tsv_m"}, {"type": "ties", "density": 0.4}])
def test_the_inner_rule_sees_the_cores_of_one_weight(llamas, inner):
    left_OK, right_LI = bases(llamas, NAME)
    cores = {
        task: {"core": left_OK.T @ d @ right_LI.T} for task, d in zip("abc", llamas.deltas(NAME), strict=True)
    }
    settings = {key: value for key, value in inner.items() if key != "type"}
    core = merging.merge(inner["type"], {"core": torch.zeros(9, 9).double()}, cores, **settings)["core"]

    merged = merging.merge("core_space", llamas.base, llamas.experts, inner=inner)

    wanted = llamas.tensors[NAME].double() + 0.2 * left_OK @ core @ right_LI
    assert torch.allclose(merged[NAME].double(), wanted, atol=1e-6)


def test_an_isotropic_core_has_one_singular_value(llamas):
    inner = {"type": "task_arithmetic", "scale": 1.0}

    merged = merging.merge("core_space", llamas.base, llamas.experts, inner=inner, scale=1.0, isotropize=True)

    values = torch.linalg.svdvals(merged[NAME].double() - llamas.tensors[NAME].double())
    mean = torch.linalg.svdvals(llamas.deltas(NAME).sum(0))[:9].mean()
    assert torch.allclose(values[:9], mean.expand(9), atol=1e-5)
    assert values[9] < 1e-5
