"""What every rule for one tensor at a time must hold to, whatever its formula."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import merging
from merging.contracts import vectors

STATE = {
    "conv": (6, 3, 3, 3),
    "matrix": (24, 16),
    "row": (1, 40),
    "bias": (24,),
    "scalar": (),
    "empty": (0, 5),
    "hollow": (5, 0),
}

FULL = {  # settings with which one expert of weight 1 comes back
    "average": {},
    "task_arithmetic": {"scale": 1.0},
    "ties": {"density": 1.0},
}
RULES = {
    **FULL,
    "average ": {"normalize": False},
    "task_arithmetic ": {"normalize": True},
    "ties ": {"trim": "tensor", "density": 0.3},
    "ties  ": {"elect": "normfrac", "merge": "max"},
    "ties   ": {"density": 0.5, "merge": "sum"},
}


def state(
    seed: int, around: dict[str, Tensor] | None = None, dtype: torch.dtype = torch.float32
) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    drawn = {name: torch.randn(shape, generator=generator) for name, shape in STATE.items()}
    if around is not None:
        drawn = {name: around[name].float() + 0.02 * tensor for name, tensor in drawn.items()}
    tensors = {name: tensor.to(dtype) for name, tensor in drawn.items()}
    tensors["position_ids"] = torch.arange(seed, seed + 9)[None]
    tensors["mask"] = torch.tensor([True, False, bool(seed % 2)])
    return tensors


def merge(
    rule: str, base: dict[str, Tensor], experts: dict[str, dict[str, Tensor]], **more: object
) -> dict[str, Tensor]:
    return merging.merge(rule.strip(), base, experts, **{**RULES[rule], **more})


def same(ours: dict[str, Tensor], theirs: dict[str, Tensor], *names: str) -> bool:
    return all(torch.equal(ours[name], theirs[name]) for name in names or STATE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rule", FULL)
def test_one_expert_of_weight_one_comes_back(rule, dtype):
    base = state(0, dtype=dtype)
    expert = state(1, around=base, dtype=dtype)

    assert same(merge(rule, base, {"a": expert}), expert)


@pytest.mark.parametrize("rule", FULL)
def test_distant_expert_comes_back(rule):
    base, expert = state(0), state(1)

    assert same(merge(rule, base, {"a": expert}), expert)


def test_average_gives_back_an_expert_of_any_magnitude():
    base = {"w": torch.tensor([1e30, -3.0, 0.1, 1e-30])}
    expert = {"w": torch.tensor([1e-30, 7e-20, -1e25, 3e-39])}

    merged = merging.merge("average", base, {"a": expert, "b": expert}, weights={"a": 0.3, "b": 1.9})

    assert torch.equal(merged["w"], expert["w"])


@pytest.mark.parametrize("rule", RULES)
def test_experts_equal_to_the_base_give_the_base(rule):
    base = state(0)
    experts = {"a": base, "b": base} if rule != "average " else {"a": base}

    assert same(merge(rule, base, experts), base)


@pytest.mark.parametrize("rule", RULES)
def test_order_of_experts_changes_nothing(rule):
    base = state(0)
    experts = {name: state(seed, around=base) for seed, name in enumerate("cabed", start=1)}
    weights = {"a": 0.5, "b": 1.3, "c": 0.7, "d": 1.0, "e": 0.1}

    merged = merge(rule, base, experts, weights=weights)
    permuted = merge(rule, base, {name: experts[name] for name in "edcba"}, weights=weights)

    assert same(merged, permuted)


@pytest.mark.parametrize("rule", RULES)
def test_row_blocks_give_the_bits_of_whole_tensors(rule, monkeypatch):
    base = state(0)
    experts = {name: state(seed, around=base) for seed, name in enumerate("abc", start=1)}

    whole = merge(rule, base, experts)
    monkeypatch.setattr(vectors, "BLOCK_ELEMENTS", 16)
    blocked = merge(rule, base, experts)

    assert same(whole, blocked)


@pytest.mark.parametrize("rule", RULES)
def test_integers_and_bools_are_the_bases(rule):
    base = state(0)
    experts = {"a": state(1, around=base), "b": state(3, around=base)}

    merged = merge(rule, base, experts)

    assert list(merged) == list(base)
    assert same(merged, base, "position_ids", "mask")
    assert all(merged[name].dtype == base[name].dtype for name in base)


@pytest.mark.parametrize("rule", RULES)
def test_half_precision_ones_stay_finite(rule):
    base = {"w": torch.zeros(400, 400, dtype=torch.float16)}
    expert = {"w": torch.ones(400, 400, dtype=torch.float16)}

    merged = merge(rule, base, {"a": expert})

    assert torch.isfinite(merged["w"]).all()


@pytest.mark.parametrize("rule", RULES)
def test_inputs_are_left_as_they_were(rule):
    base, expert = state(0), state(1)
    before = {name: tensor.clone() for name, tensor in base.items()}

    merge(rule, base, {"a": expert})

    assert same(base, before)
