"""Cholesky by panels, and systems that stay what they were after a solve."""

from __future__ import annotations

import pytest
import torch

from merging.normal_equations import NormalEquations
from merging.symmetric_systems import factor_, restore_


@pytest.mark.parametrize("features", [1, 191, 384, 385, 777])
def test_panels_multiply_to_the_matrix(features: int) -> None:
    rows = torch.randn(
        2 * features, features, dtype=torch.float64, generator=torch.Generator().manual_seed(1)
    )
    matrix = rows.T @ rows
    before = matrix.clone()
    factor, heads = factor_(matrix)
    assert factor is not None
    lower = factor.lower_DD.tril()
    assert torch.allclose(lower @ lower.T, before, rtol=1e-12, atol=1e-9)
    assert torch.allclose(factor.times(rows[:features]), before @ rows[:features], rtol=1e-10, atol=1e-7)
    assert torch.allclose(factor.solved(before), torch.eye(features, dtype=torch.float64), rtol=0, atol=1e-6)
    restore_(matrix, heads)
    assert torch.equal(matrix, before)


@pytest.mark.parametrize("broken", [0, 250, 399])
def test_what_is_not_positive_definite_has_none(broken: int) -> None:
    matrix = torch.eye(400, dtype=torch.float64)
    matrix[broken, broken] = -1.0
    matrix[0, 1:] = matrix[1:, 0] = 0.01
    before = matrix.clone()
    factor, heads = factor_(matrix)
    assert factor is None
    restore_(matrix, heads)
    assert torch.equal(matrix, before)


def test_equations_go_on_after_a_solve_as_if_there_was_none() -> None:
    generator = torch.Generator().manual_seed(2)
    grams = [rows.T @ rows for rows in torch.randn(2, 60, 20, generator=generator)]
    weights = torch.randn(2, 4, 20, generator=generator)
    once, twice = NormalEquations(20, 4), NormalEquations(20, 4)
    for equations in (once, twice):
        equations.add(weights[0], grams[0], tokens=60)
        if equations is twice:
            equations.solve(ridge=0.3)
        equations.add(weights[1], grams[1], tokens=60)
    assert torch.allclose(once.lhs_DD, twice.lhs_DD, rtol=1e-12)
    assert torch.allclose(once.solve(ridge=0.1), twice.solve(ridge=0.1), rtol=1e-10)
