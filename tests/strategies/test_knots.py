"""KnOTS: what a merge in the shared basis must be, on adapters which PEFT wrote and on edges."""

from __future__ import annotations

import pytest
import torch
from lora_experts import llamas as llamas
from safetensors.torch import save_file

import merging
from merging import low_rank
from merging.checkpoints.lora import LoraSource
from merging.checkpoints.lora_config import LoraConfig
from merging.checkpoints.source import StateDictSource
from merging.errors import CheckpointError, SpecError
from merging.low_rank import LowRank

PLAIN_SUM = {"type": "task_arithmetic", "scale": 1.0}


def plain(base, **factors):
    """Experts on a base of matrices, from (B, A) by expert and tensor; alpha = r."""
    source, experts = StateDictSource(base), {}
    for task, pairs in factors.items():
        tensors = {}
        for name, (b, a) in pairs.items():
            tensors |= {f"{name}.lora_B.weight": b, f"{name}.lora_A.weight": a}
        ranks = {name: a.shape[0] for name, (_, a) in pairs.items()}
        config = LoraConfig(rank_pattern=ranks, alpha_pattern=ranks)
        experts[task] = LoraSource(source, StateDictSource(tensors), config, label=task)
    return experts


@pytest.mark.parametrize("concat", ["inputs", "outputs"])
def test_a_plain_sum_in_the_shared_basis_is_the_plain_sum(llamas, concat):
    merged = merging.merge("knots", llamas.base, llamas.experts, inner=PLAIN_SUM, scale=0.5, concat=concat)

    for name, base_S in llamas.tensors.items():
        wanted = base_S.double() + 0.5 * llamas.deltas(name).sum(0)
        assert torch.allclose(merged[name].double(), wanted, atol=1e-6), name
    untouched = [name for name in llamas.tensors if "norm" in name or "embed" in name or "k_proj" in name]
    assert untouched
    assert all(torch.equal(merged[name], llamas.tensors[name]) for name in untouched)


def test_ties_acts_on_the_coordinates_of_all_weights_together(llamas):
    names = [name for name in llamas.tensors if llamas.deltas(name).any()]
    bases, coordinates = {}, {}
    for name in names:
        deltas_NOI = llamas.deltas(name)
        u, s, vh = torch.linalg.svd(torch.cat(list(deltas_NOI), dim=1), full_matrices=False)
        kept = s > 1e-5
        bases[name] = u[:, kept]
        coordinates[name] = list((s[kept, None] * vh[kept]).chunk(3, dim=1))
    zeros = {name: torch.zeros_like(parts[0]) for name, parts in coordinates.items()}
    experts = {task: {name: parts[i] for name, parts in coordinates.items()} for i, task in enumerate("abc")}
    inner = merging.merge("ties", zeros, experts, density=0.3)

    merged = merging.merge(
        "knots", llamas.base, llamas.experts, inner={"type": "ties", "density": 0.3}, scale=0.7
    )

    for name in names:
        wanted = llamas.tensors[name].double() + 0.7 * bases[name] @ inner[name]
        assert torch.allclose(merged[name].double(), wanted, atol=1e-5), name


def test_weights_of_experts_reach_the_inner_rule(llamas):
    weights = {"a": 2.0, "b": -1.0, "c": 0.5}

    merged = merging.merge("knots", llamas.base, llamas.experts, weights=weights, inner=PLAIN_SUM, scale=1.0)

    for name, base_S in llamas.tensors.items():
        wanted = base_S.double() + torch.einsum(
            "n,n...->...", torch.tensor([2.0, -1.0, 0.5]).double(), llamas.deltas(name)
        )
        assert torch.allclose(merged[name].double(), wanted, atol=1e-5)


@pytest.mark.parametrize(
    "inner", ["ties", "dare", "dare_ties", "della", "breadcrumbs", "sce", "average", "wudi", "tsv_m"]
)
@pytest.mark.parametrize("rule", ["knots", "core_space"])
def test_every_rule_without_data_merges_coordinates(llamas, rule, inner):
    merged = merging.merge(rule, llamas.base, llamas.experts, inner=inner, seed=3)
    again = merging.merge(rule, llamas.base, dict(reversed(llamas.experts.items())), inner=inner, seed=3)

    name = "model.layers.0.self_attn.q_proj.weight"
    assert not torch.equal(merged[name], llamas.tensors[name])
    assert all(torch.isfinite(tensor).all() for tensor in merged.values())
    assert all(torch.equal(merged[name], again[name]) for name in merged)


@pytest.mark.parametrize("rule", ["knots", "core_space"])
def test_experts_that_change_nothing_give_the_base(rule):
    base = {"fc.weight": torch.randn(6, 5)}
    nothing = {"fc": (torch.zeros(6, 2), torch.randn(2, 5))}

    merged = merging.merge(rule, base, plain(base, a=nothing, b=nothing))

    assert torch.equal(merged["fc.weight"], base["fc.weight"])


@pytest.mark.parametrize("rule", ["knots", "core_space"])
def test_one_expert_that_changes_nothing_does_not_disturb_a_sum(rule):
    base = {"fc.weight": torch.randn(6, 5)}
    b, a = torch.randn(6, 2), torch.randn(2, 5)
    experts = plain(base, a={"fc": (b, a)}, b={"fc": (torch.zeros(6, 3), torch.zeros(3, 5))})

    merged = merging.merge(rule, base, experts, inner=PLAIN_SUM, scale=1.0)

    assert torch.allclose(merged["fc.weight"], base["fc.weight"] + b @ a, atol=1e-5)


@pytest.mark.parametrize("rule", ["knots", "core_space"])
def test_more_ranks_than_rows_or_columns_are_exact_too(rule):
    base = {"fc.weight": torch.randn(6, 5)}
    factors = {task: {"fc": (torch.randn(6, 4), torch.randn(4, 5))} for task in "abc"}

    merged = merging.merge(rule, base, plain(base, **factors), inner=PLAIN_SUM, scale=1.0)

    wanted = base["fc.weight"] + sum(b @ a for b, a in (pairs["fc"] for pairs in factors.values()))
    assert torch.allclose(merged["fc.weight"], wanted, atol=1e-5)


def test_folded_adapters_merge_as_the_adapters_do(llamas):
    adapters = merging.merge("knots", llamas.base, llamas.experts)

    folded = merging.merge("knots", llamas.base, llamas.full())

    assert all(torch.allclose(folded[name], adapters[name], atol=1e-5) for name in folded)


@pytest.mark.parametrize("rule", ["knots", "core_space"])
def test_changes_of_full_rank_are_refused_with_tensor_and_rank(llamas, rule):
    experts = llamas.full()
    name = "model.layers.1.mlp.up_proj.weight"
    experts["b"][name] = experts["b"][name] + 0.1 * torch.randn(64, 32)

    with pytest.raises(CheckpointError, match=rf'"b": {name}: its change has rank 32 of 32[\s\S]*"adapter"'):
        merging.merge(rule, llamas.base, experts)


def test_biases_and_norms_get_their_mean_change_or_stay(llamas):
    experts = llamas.full()
    name = "model.norm.weight"
    experts["a"][name] = experts["a"][name] + 0.3

    mean = merging.merge("knots", llamas.base, experts, scale=0.5)
    kept = merging.merge("knots", llamas.base, experts, scale=0.5, others="base")

    assert torch.allclose(mean[name], llamas.tensors[name] + 0.5 * 0.1)
    assert torch.equal(kept[name], llamas.tensors[name])


@pytest.mark.parametrize(
    ("inner", "words"),
    [
        ("regmean", 'inner: "regmean" does not merge single tensors without data'),
        ("knots", 'inner: "knots" does not merge single tensors'),
        ({"type": "ties", "density": 2}, r"inner\.density: found the number 2, expected at most 1"),
        ("teis", r'inner\.type: unknown strategy "teis"'),
        ({"density": 0.2}, r"inner\.type: missing"),
    ],
)
def test_an_inner_rule_that_cannot_be_is_refused_at_its_place(llamas, inner, words):
    with pytest.raises(SpecError, match=words):
        merging.merge("knots", llamas.base, llamas.experts, inner=inner)


def test_weights_are_refused_where_the_inner_rule_has_none(llamas):
    with pytest.raises(SpecError, match='inner: "model_stock" does not use weights'):
        merging.merge("knots", llamas.base, llamas.experts, weights={"a": 2.0}, inner="model_stock")


def test_the_shared_basis_spans_all_changes_without_a_product_of_them():
    torch.manual_seed(0)
    terms = [LowRank(torch.randn(20, r), torch.randn(r, 12), 0.5) for r in (1, 3, 2)]

    basis_OK = low_rank.side_by_side(terms, floor=1e-5)

    left_OK = torch.linalg.svd(torch.cat([term.product() for term in terms], dim=1), full_matrices=False)[0][
        :, :6
    ]
    assert basis_OK.shape == (20, 6)
    assert torch.allclose((basis_OK.T @ left_OK).abs(), torch.eye(6).double(), atol=1e-8)


def test_a_folder_with_an_adapter_is_taken_as_one(llamas):
    places = {task: llamas.folder / task for task in llamas.experts}

    merged = merging.merge("knots", llamas.folder / "base", places)

    wanted = merging.merge("knots", llamas.base, llamas.experts)
    assert all(torch.equal(merged[name], wanted[name]) for name in wanted)


def test_kernels_are_matrices_of_outputs_by_the_rest(tmp_path):
    base = {"conv.weight": torch.randn(6, 3, 2, 2)}
    source = StateDictSource(base)
    tensors = {"conv.lora_A.weight": torch.randn(2, 3, 2, 2), "conv.lora_B.weight": torch.randn(6, 2, 1, 1)}
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    expert = LoraSource(source, StateDictSource(tensors), LoraConfig(r=2, lora_alpha=2))

    merged = merging.merge("knots", base, {"a": expert}, inner=PLAIN_SUM, scale=1.0)

    change = (tensors["conv.lora_B.weight"].flatten(1) @ tensors["conv.lora_A.weight"].flatten(1)).view(
        6, 3, 2, 2
    )
    assert torch.allclose(merged["conv.weight"], base["conv.weight"] + change, atol=1e-5)
