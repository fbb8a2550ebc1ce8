"""Average."""

from __future__ import annotations

import pytest
import torch

import merging
from merging.errors import MergingError
from merging.strategies.average import Average


def test_bf16_mean_is_rounded_once():
    generator = torch.Generator().manual_seed(0)
    experts = {name: {"w": torch.randn(200, 300, generator=generator).bfloat16()} for name in "abc"}

    merged = merging.merge("average", experts["a"], experts)

    oracle = torch.stack([expert["w"].double() for expert in experts.values()]).mean(dim=0)
    assert torch.equal(merged["w"], oracle.bfloat16())


def test_without_normalizing_weights_are_factors():
    expert = {"w": torch.randn(50)}

    merged = merging.merge(
        "average", expert, {"a": expert, "b": expert}, weights={"a": 0.1, "b": 1.0}, normalize=False
    )

    torch.testing.assert_close(merged["w"], 1.1 * expert["w"])


def test_weights_that_sum_to_zero_are_refused():
    expert = {"w": torch.randn(50)}

    with pytest.raises(MergingError, match="sum to 0"):
        merging.merge("average", expert, {"a": expert, "b": expert}, weights={"a": 1, "b": -1})


def test_plan_knows_the_effective_coefficients():
    weights = {"a": 0.1, "b": 1.0}

    normalized = Average.coefficients(Average.Settings(), weights)
    plain = Average.coefficients(Average.Settings(normalize=False), weights)

    assert normalized == pytest.approx({"a": 1 / 11, "b": 10 / 11})
    assert plain == weights


def test_base_counts_only_when_listed():
    base, expert = {"w": torch.zeros(5)}, {"w": torch.ones(5)}

    without = merging.merge("average", base, {"a": expert})
    listed = merging.merge("average", base, {"a": expert, "base": base})

    assert without["w"].tolist() == [1.0] * 5
    assert listed["w"].tolist() == [0.5] * 5
