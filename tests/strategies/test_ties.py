"""TIES: which entries are kept, which sign is elected, what becomes of those that agree."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import merging
from merging.checkpoints.source import StateDictSource
from merging.contracts import vectors
from merging.contracts.models import Models
from merging.contracts.vectors import TaskVectors
from merging.errors import SpecError
from merging.strategies.ties import Ties


def ties(*deltas: list[float], base: float = 0.0, **settings: object) -> Tensor:
    size = len(deltas[0])
    experts = {f"e{i}": {"w": base + torch.tensor(delta)} for i, delta in enumerate(deltas)}
    return merging.merge("ties", {"w": torch.full((size,), base)}, experts, **settings)["w"]


def test_one_expert_keeps_its_top_entries():
    base = {"a": torch.zeros(60), "b": torch.zeros(40)}
    expert = {"a": torch.randn(60), "b": torch.randn(40)}

    merged = merging.merge("ties", base, {"e": expert}, density=0.2)

    flat, kept = torch.cat([*expert.values()]), torch.cat([*merged.values()])
    largest = flat.abs() >= flat.abs().sort().values[79]
    assert torch.equal(kept, flat.where(largest, 0))


def test_mean_is_over_the_experts_that_agree():
    merged = ties([4.0, 1.0], [2.0, -3.0], [-1.0, 0.0], density=1.0)

    assert merged.tolist() == [3.0, -3.0]


def test_zero_vector_counts_for_nothing():
    assert torch.equal(ties([4.0, 1.0], [2.0, -3.0], [0.0, 0.0]), ties([4.0, 1.0], [2.0, -3.0]))


@pytest.mark.parametrize(("rest", "expected"), [([5.0, 5.0], 1.0), ([-5.0, -5.0], -1.0), ([5.0, -5.0], -1.0)])
def test_where_entries_cancel_the_models_majority_decides(rest, expected):
    merged = ties([1.0, *rest], [-1.0, *rest], density=1.0)

    assert merged[0].item() == expected


def test_where_entries_cancel_plus_is_elected_per_tensor():
    merged = ties([1.0, -5.0, -5.0], [-1.0, -5.0, -5.0], density=1.0, trim="tensor")

    assert merged[0].item() == 1.0


def test_weights_count_in_election_and_mean():
    base = {"w": torch.zeros(2)}
    experts = {"a": {"w": torch.tensor([1.0, 1.0])}, "b": {"w": torch.tensor([-3.0, 4.0])}}

    merged = merging.merge("ties", base, experts, weights={"a": 4, "b": 1}, density=1.0)

    assert merged["w"].tolist() == pytest.approx([1.0, (4 * 1 + 1 * 4) / 5])


def test_trim_per_tensor_keeps_exactly_the_share_of_each():
    base = {"a": torch.zeros(10, 10), "b": torch.zeros(50)}
    expert = {"a": torch.randn(10, 10), "b": 100 * torch.randn(50)}

    merged = merging.merge("ties", base, {"e": expert}, density=0.3, trim="tensor")

    assert {name: int((tensor != 0).sum()) for name, tensor in merged.items()} == {"a": 30, "b": 15}


@pytest.mark.parametrize("density", [0, -0.1, 1.5])
def test_density_out_of_range_is_refused(density):
    with pytest.raises(SpecError, match="density"):
        ties([1.0], density=density)


def test_thresholds_are_found_block_by_block(monkeypatch):
    monkeypatch.setattr(vectors, "BLOCK_ELEMENTS", 64)
    base = {"w": torch.zeros(100, 50)}
    expert = {"w": torch.randn(100, 50)}
    models = Models(StateDictSource(base), {"e": StateDictSource(expert)}, {"e": 1.0})
    rule = Ties()

    walk = TaskVectors(models, torch.float64, blocked=rule.elementwise)

    assert rule.elementwise
    sizes: list[int] = []
    walk.visit(lambda _, deltas_NS: sizes.append(deltas_NS.numel()))
    assert max(sizes) <= 64
    assert sum(sizes) == 5000
