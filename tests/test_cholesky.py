"""Cholesky by panels, and systems that stay what they were after a solve."""

from __future__ import annotations

import pytest
import torch

from merging.normal_equations import NormalEquations, cholesky


@pytest.mark.parametrize("features", [1, 191, 384, 385, 777])
def test_panels_multiply_to_the_matrix(features: int) -> None:
    rows = torch.randn(
        2 * features, features, dtype=torch.float64, generator=torch.Generator().manual_seed(1)
    )
    matrix = rows.T @ rows
    before = matrix.clone()
    factor = cholesky(matrix)
    assert factor is not None
    assert torch.equal(matrix, before)
    lower = factor.tril()
    assert torch.allclose(lower @ lower.T, matrix, rtol=1e-12, atol=1e-9)


@pytest.mark.parametrize("broken", [0, 250, 399])
def test_what_is_not_positive_definite_has_none(broken: int) -> None:
    matrix = torch.eye(400, dtype=torch.float64)
    matrix[broken, broken] = -1.0
    assert cholesky(matrix) is None


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
