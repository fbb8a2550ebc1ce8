"""The Gaussian 2-Wasserstein distance against its textbook formula."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from merging.evaluation.frechet import frechet

linalg = pytest.importorskip("scipy.linalg")


def tokens(count, features, seed, *, moved=0.0, scale=1.0):
    random = torch.Generator().manual_seed(seed)
    mixing = torch.randn(features, features, generator=random, dtype=torch.float64)
    drawn = torch.randn(count, features, generator=random, dtype=torch.float64)
    return (drawn @ mixing * scale + moved).float()


def by_roots(ours, theirs):
    """The formula as it stands, with SciPy's root of a matrix, in float64."""
    a, b = (one.double().numpy() for one in (ours, theirs))
    moved = a.mean(0) - b.mean(0)
    covariances = [np.cov(one, rowvar=False, bias=True) for one in (a, b)]
    root = linalg.sqrtm(covariances[1])
    cross = linalg.sqrtm(root @ covariances[0] @ root)
    return np.sqrt(moved @ moved + np.trace(covariances[0] + covariances[1] - 2 * np.real(cross)))


@pytest.mark.parametrize(("moved", "scale"), [(0.0, 1.0), (3.0, 1.0), (0.0, 2.5), (-1.0, 0.3)])
def test_it_is_the_formula_with_matrix_roots(moved, scale):
    ours, theirs = tokens(400, 12, seed=1, moved=moved, scale=scale), tokens(300, 12, seed=2)

    assert frechet(ours, theirs) == pytest.approx(by_roots(ours, theirs), rel=1e-7)


def test_fewer_tokens_than_features_are_as_good():
    """Covariances of low rank, which a root of a matrix takes badly: embedded by an isometry, the same
    distance."""
    ours, theirs = tokens(30, 6, seed=1, moved=1.0), tokens(30, 6, seed=2)
    isometry = torch.linalg.qr(torch.randn(40, 6, generator=torch.Generator().manual_seed(3)).double()).Q

    embedded = frechet(ours.double() @ isometry.T, theirs.double() @ isometry.T)

    assert embedded == pytest.approx(by_roots(ours, theirs), rel=1e-7)


@pytest.mark.parametrize("count", [5, 50])
def test_the_same_tokens_in_any_order_are_no_distance_apart(count):
    ours = tokens(count, 12, seed=1)

    assert frechet(ours, ours) == 0
    assert frechet(ours, ours.flip(0)) == 0


def test_a_shift_alone_is_its_length():
    ours = tokens(50, 12, seed=1).double()

    assert frechet(ours + 0.25, ours) == pytest.approx(0.25 * 12**0.5, rel=1e-9)


def test_it_is_no_more_than_the_root_mean_square_of_the_differences():
    ours, theirs = tokens(200, 12, seed=1), tokens(200, 12, seed=2)

    paired = (ours - theirs).double().square().sum(1).mean().sqrt().item()

    assert 0 < frechet(ours, theirs) < paired
