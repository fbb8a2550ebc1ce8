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
    "dare": {"density": 1.0, "scale": 1.0},
    "dare_ties": {"density": 1.0},
    "della": {"density": 1.0},
    "breadcrumbs": {"density": 1.0, "scale": 1.0},
    "sce": {"density": 1.0},
    "slerp": {"t": 1.0},
    "karcher": {},
}
RULES = {  # a name is the rule's, after a dash what is special about the settings
    "average": {},
    "average-plain": {"normalize": False},
    "task_arithmetic": {},
    "task_arithmetic-normalized": {"normalize": True},
    "ties": {},
    "ties-tensor": {"trim": "tensor", "density": 0.3},
    "ties-normfrac": {"elect": "normfrac", "merge": "max"},
    "ties-sum": {"density": 0.5, "merge": "sum"},
    "dare": {},
    "dare-norm": {"rescale": "norm"},
    "dare_ties": {},
    "dare_ties-trimmed": {"trim": 0.2, "density": 0.7},
    "dare_ties-norm": {"rescale": "norm"},
    "dare_ties-norm-trimmed": {"rescale": "norm", "trim": 0.2, "density": 0.7},
    "della": {},
    "della-linear": {"elect": False, "rescale": "norm"},
    "breadcrumbs": {},
    "breadcrumbs-elected": {"elect": True, "gamma": 0.1},
    "sce": {"density": 0.4},
    "slerp": {},
    "karcher": {},
    "model_stock": {},
    "model_stock-rows": {"rows": True, "mean": "angles", "clamp": False},
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
    rule: str, base: dict[str, Tensor], experts: dict[str, dict[str, Tensor]], **options: object
) -> dict[str, Tensor]:
    settings = {**RULES.get(rule, {}), **options}
    return merging.merge(rule.partition("-")[0], base, experts, **settings)


def around(base: dict[str, Tensor], rule: str, seed: int = 1) -> dict[str, dict[str, Tensor]]:
    """Experts near the base, as many as the rule takes."""
    names = "ab" if rule.startswith("slerp") else "abcde"
    return {name: state(i, around=base) for i, name in enumerate(names, start=seed)}


def weights(rule: str) -> dict[str, float] | None:
    """Weights for the experts of `around`, where the rule uses weights."""
    from merging.components import strategies

    if not strategies.get(rule.partition("-")[0]).weighted:
        return None
    experts = around(state(0), rule)
    return dict(zip(experts, [0.5, 1.3, 0.7, 1.0, 0.1], strict=False))


def same(ours: dict[str, Tensor], theirs: dict[str, Tensor], *names: str) -> bool:
    return all(torch.equal(ours[name], theirs[name]) for name in names or STATE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rule", FULL)
def test_one_expert_of_weight_one_comes_back(rule, dtype):
    base = state(0, dtype=dtype)
    expert = state(1, around=base, dtype=dtype)

    assert same(merge(rule, base, {"a": expert}, **FULL[rule]), expert)


@pytest.mark.parametrize("rule", FULL)
def test_distant_expert_comes_back(rule):
    base, expert = state(0), state(1)

    assert same(merge(rule, base, {"a": expert}, **FULL[rule]), expert)


def test_average_gives_back_an_expert_of_any_magnitude():
    base = {"w": torch.tensor([1e30, -3.0, 0.1, 1e-30])}
    expert = {"w": torch.tensor([1e-30, 7e-20, -1e25, 3e-39])}

    merged = merging.merge("average", base, {"a": expert, "b": expert}, weights={"a": 0.3, "b": 1.9})

    assert torch.equal(merged["w"], expert["w"])


@pytest.mark.parametrize("rule", sorted(RULES.keys() - {"average-plain"}))
def test_experts_equal_to_the_base_give_the_base(rule):
    base = state(0)

    assert same(merge(rule, base, {"a": base, "b": base}), base)


@pytest.mark.parametrize("rule", RULES)
def test_order_of_experts_changes_nothing(rule):
    base = state(0)
    experts = around(base, rule)

    merged = merge(rule, base, experts, weights=weights(rule))
    permuted = merge(rule, base, dict(reversed(experts.items())), weights=weights(rule))

    assert same(merged, permuted)


@pytest.mark.parametrize("rule", RULES)
def test_row_blocks_give_the_bits_of_whole_tensors(rule, monkeypatch):
    base = state(0)
    experts = around(base, rule)

    whole = merge(rule, base, experts)
    monkeypatch.setattr(vectors, "BLOCK_ELEMENTS", 16)
    blocked = merge(rule, base, experts)

    assert same(whole, blocked)


@pytest.mark.parametrize("rule", RULES)
def test_integers_and_bools_are_the_bases(rule):
    base = state(0)

    merged = merge(rule, base, around(base, rule))

    assert list(merged) == list(base)
    assert same(merged, base, "position_ids", "mask")
    assert all(merged[name].dtype == base[name].dtype for name in base)


@pytest.mark.parametrize("rule", RULES)
def test_half_precision_ones_stay_finite(rule):
    base = {"w": torch.zeros(400, 400, dtype=torch.float16)}
    expert = {"w": torch.ones(400, 400, dtype=torch.float16)}

    merged = merge(rule, base, {"a": expert, "b": base})

    assert torch.isfinite(merged["w"]).all()


@pytest.mark.parametrize("rule", RULES)
def test_inputs_are_left_as_they_were(rule):
    base = state(0)
    experts = around(base, rule)
    before = {
        name: {key: tensor.clone() for key, tensor in expert.items()} for name, expert in experts.items()
    }

    merge(rule, base, experts)

    assert same(base, state(0))
    assert all(same(experts[name], before[name]) for name in experts)


def test_importing_rules_does_not_import_torch():
    import subprocess
    import sys

    rules = sorted({rule.partition("-")[0] for rule in RULES})
    modules = ", ".join(f"merging.strategies.{rule}" for rule in [*rules, "checkpoint"])
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules)"

    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
