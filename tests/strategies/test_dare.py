"""DARE and DARE-TIES: what is kept, how it is rescaled, and that draws depend on names alone."""

from __future__ import annotations

import pytest
import torch

import merging
from merging.errors import SpecError

BASE = {"w": torch.zeros(100, 100), "b": torch.zeros(50)}


def expert(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(tensor.shape, generator=generator) for name, tensor in BASE.items()}


def test_density_is_the_share_that_is_kept():
    merged = merging.merge("dare", BASE, {"a": expert(1)}, density=0.1, scale=2.0)

    kept = int((merged["w"] != 0).sum())
    assert abs(kept - 1000) < 3 * (10_000 * 0.1 * 0.9) ** 0.5
    torch.testing.assert_close(merged["w"][merged["w"] != 0], 20 * expert(1)["w"][merged["w"] != 0])


def test_mean_over_seeds_is_the_task_vector():
    base, one = {"w": torch.zeros(200)}, {"w": torch.ones(200)}

    draws = torch.stack(
        [
            merging.merge("dare", base, {"a": one}, density=0.5, scale=1.0, seed=seed)["w"]
            for seed in range(200)
        ]
    )

    assert abs(draws.mean() - 1) < 3 / (200 * 200) ** 0.5


@pytest.mark.parametrize("rescale", ["expectation", "norm", "none"])
def test_keep_all_is_task_arithmetic_bit_for_bit(rescale):
    experts = {"a": expert(1), "b": expert(2)}

    dare = merging.merge("dare", BASE, experts, density=1.0, scale=0.4, rescale=rescale)

    arithmetic = merging.merge("task_arithmetic", BASE, experts, scale=0.4)
    assert all(torch.equal(dare[name], arithmetic[name]) for name in BASE)


def test_norm_keeps_the_l1_norm_of_each_tensor():
    merged = merging.merge("dare", BASE, {"a": expert(1)}, density=0.3, scale=1.0, rescale="norm")

    for name, tensor in merged.items():
        torch.testing.assert_close(tensor.abs().sum(), expert(1)[name].abs().sum())


def test_norm_of_half_precision_does_not_overflow():
    base = {"w": torch.zeros(400, 400, dtype=torch.float16)}
    one = {"w": torch.ones(400, 400, dtype=torch.float16)}

    merged = merging.merge("dare", base, {"a": one}, density=0.5, scale=1.0, rescale="norm")

    assert torch.isfinite(merged["w"]).all()
    assert merged["w"].double().sum() == pytest.approx(160_000, rel=1e-3)


@pytest.mark.parametrize("density", [0, -0.1, 1.5])
def test_density_out_of_range_is_refused(density):
    with pytest.raises(SpecError, match="density"):
        merging.merge("dare", BASE, {"a": expert(1)}, density=density)


@pytest.mark.parametrize("rule", ["dare", "dare_ties", "della"])
def test_draws_depend_on_seed_and_names_alone(rule):
    def kept(names: tuple[str, ...], seed: int = 0) -> dict[str, torch.Tensor]:
        experts = {name: expert(1) if name == "a" else BASE for name in names}
        merged = merging.merge(rule, BASE, experts, density=0.5, seed=seed)
        return {name: tensor != 0 for name, tensor in merged.items()}

    first = kept(("a",))

    assert all(torch.equal(first[name], kept(("z", "a", "b"))[name]) for name in BASE)
    assert not torch.equal(first["w"], kept(("a",), seed=1)["w"])


@pytest.mark.parametrize("rule", ["dare", "dare_ties", "della"])
def test_threads_change_nothing(rule):
    experts = {"a": expert(1), "b": expert(2)}
    before = torch.get_num_threads()

    one = merging.merge(rule, BASE, experts)
    torch.set_num_threads(8)
    try:
        eight = merging.merge(rule, BASE, experts)
    finally:
        torch.set_num_threads(before)

    assert all(torch.equal(one[name], eight[name]) for name in BASE)


def test_tensors_that_no_pattern_names_are_added_in_full():
    merged = merging.merge("dare", BASE, {"a": expert(1)}, density=0.1, scale=1.0, tensors=["w"])

    assert torch.equal(merged["b"], expert(1)["b"])
    assert int((merged["w"] != 0).sum()) < 2000


def test_dare_ties_of_density_one_without_trim_is_ties_of_density_one():
    experts = {"a": expert(1), "b": expert(2), "c": expert(3)}

    dare = merging.merge("dare_ties", BASE, experts, density=1.0)

    ties = merging.merge("ties", BASE, experts, density=1.0)
    assert all(torch.equal(dare[name], ties[name]) for name in BASE)


def test_where_dropped_entries_cancel_the_majority_is_counted_without_disturbing_the_draw(monkeypatch):
    from merging.contracts import vectors

    generator = torch.Generator().manual_seed(0)
    base = {"w": torch.zeros(40, 8)}
    experts = {name: {"w": torch.randint(-1, 2, (40, 8), generator=generator).float()} for name in "abcd"}

    whole = merging.merge("dare_ties", base, experts, density=0.8, trim=0.6)
    monkeypatch.setattr(vectors, "BLOCK_ELEMENTS", 16)
    blocked = merging.merge("dare_ties", base, experts, density=0.8, trim=0.6)

    assert torch.equal(whole["w"], blocked["w"])
