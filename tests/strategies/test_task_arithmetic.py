"""Task arithmetic."""

from __future__ import annotations

import pytest
import torch

import merging
from merging.strategies.task_arithmetic import TaskArithmetic


def test_small_deltas_of_wide_experts_survive_a_bf16_base():
    base = {"w": torch.ones(64, 64, dtype=torch.bfloat16)}
    generator = torch.Generator().manual_seed(0)
    experts = {str(i): {"w": 1 + 0.003 * torch.randn(64, 64, generator=generator)} for i in range(8)}

    merged = merging.merge("task_arithmetic", base, experts, scale=0.3)

    deltas = [expert["w"].double() - base["w"].double() for expert in experts.values()]
    oracle = base["w"].double() + 0.3 * torch.stack(deltas).sum(dim=0)
    assert torch.equal(merged["w"], oracle.bfloat16())


def test_base_among_the_experts_adds_nothing():
    base, expert = {"w": torch.randn(40)}, {"w": torch.randn(40)}

    without = merging.merge("task_arithmetic", base, {"a": expert}, scale=0.3)
    listed = merging.merge("task_arithmetic", base, {"a": expert, "base": base}, scale=0.3)

    assert torch.equal(without["w"], listed["w"])


def test_scale_one_over_n_is_the_average():
    base = {"w": torch.randn(40)}
    experts = {name: {"w": torch.randn(40)} for name in "abcd"}

    merged = merging.merge("task_arithmetic", base, experts, scale=0.25)

    torch.testing.assert_close(merged["w"], merging.merge("average", base, experts)["w"])


@pytest.mark.parametrize(
    ("weights", "normalize", "expected"),
    [
        ({"a": 1.0, "b": 3.0}, False, {"a": 0.5, "b": 1.5}),
        ({"a": 1.0, "b": 3.0}, True, {"a": 0.125, "b": 0.375}),
        ({"a": 1.0, "b": -1.0}, True, {"a": 0.5, "b": -0.5}),
    ],
)
def test_coefficients_are_those_that_are_used(weights, normalize, expected):
    base = {"w": torch.zeros(1)}
    settings = TaskArithmetic.Settings(scale=0.5, normalize=normalize)

    assert TaskArithmetic.coefficients(settings, weights) == pytest.approx(expected)
    for task, factor in expected.items():
        experts = {name: {"w": torch.tensor([float(name == task)])} for name in weights}
        merged = merging.merge(
            "task_arithmetic", base, experts, weights=weights, scale=0.5, normalize=normalize
        )
        assert merged["w"].item() == pytest.approx(factor)
