"""Moments, normal equations and records: the arithmetic below the sweep."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from merging.errors import NumericalError
from merging.grams import correlation, off_diagonal_mass
from merging.moments import Moments, NormMoments, Pool
from merging.normal_equations import NormalEquations, NormEquations
from merging.records import Records


def rows(tokens: int, features: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(tokens, features, generator=torch.Generator().manual_seed(seed)).double()


def test_moments_do_not_depend_on_batches() -> None:
    x = rows(30, 6)
    whole, parts = Moments(6), Moments(6)

    whole.add(x)
    for start in (0, 7, 8, 20):
        parts.add(x[start : {0: 7, 7: 8, 8: 20, 20: 30}[start]][None])

    assert torch.allclose(whole.gram_DD, x.T @ x / 30)
    assert torch.allclose(parts.gram_DD, whole.gram_DD)
    assert torch.allclose(parts.mean_D, x.mean(0))
    assert parts.tokens == whole.tokens == 30


def test_weighted_tokens_count_as_their_weight_and_padding_not_at_all() -> None:
    x, target = rows(4, 3), rows(4, 3, seed=1)
    x[3] = float("nan")  # what a padded token holds does not matter
    weights = torch.tensor([1.0, 0.01, 1.0, 0.0])
    moments = Moments(3, target=True)

    moments.add(x[None], weights[None], target[None])

    kept, w = x[:3], weights[:3].double()
    assert torch.allclose(moments.gram_DD, kept.T @ (kept * w[:, None]) / w.sum())
    assert torch.allclose(moments.cross_DD, target[:3].T @ (kept * w[:, None]) / w.sum())
    assert torch.allclose(moments.target_mean_D, (target[:3] * w[:, None]).sum(0) / w.sum())
    assert moments.tokens == 3


def test_unit_tokens_are_scaled_one_by_one_and_zero_tokens_stay() -> None:
    x = torch.tensor([[3.0, 4.0], [0.0, 0.0]])
    moments = Moments(2, unit_tokens=True)

    moments.add(x)

    unit = torch.tensor([0.6, 0.8])
    assert torch.allclose(moments.gram_DD, torch.outer(unit, unit) / 2)


def test_an_infinite_activation_stops_the_sum() -> None:
    with pytest.raises(NumericalError, match="not finite"):
        Moments(2).add(torch.tensor([[1.0, float("inf")]]))


def test_half_precision_inputs_are_summed_in_float32() -> None:
    moments = Moments(1)
    for _ in range(4):
        moments.add(torch.ones(1000, 1, dtype=torch.float16) * 200)

    assert moments.gram_DD.dtype == torch.float32
    assert float(moments.gram_DD) == 40000.0


def test_norm_moments_leave_padding_out() -> None:
    z = rows(3, 2)
    z[2] = float("nan")
    moments = NormMoments(2)

    moments.add(z, torch.tensor([1.0, 1.0, 0.0]))

    assert torch.allclose(moments.mean_D, z[:2].mean(0))
    assert torch.allclose(moments.square_D, z[:2].square().mean(0))


def test_one_task_gives_its_weight_back() -> None:
    x, weight = rows(50, 5), rows(4, 5, seed=1)
    equations = NormalEquations(5, 4)

    equations.add(weight, x.T @ x / 50, tokens=50)
    solved = equations.solve()

    assert torch.allclose(solved, weight)
    assert equations.health is not None
    assert (equations.health.fallback, equations.health.short_of_tokens) == ("", False)
    assert 1 < equations.health.condition < 100


def test_directions_without_tokens_keep_the_anchor() -> None:
    x, weight, anchor = rows(2, 5), rows(4, 5, seed=1), rows(4, 5, seed=2)
    equations = NormalEquations(5, 4)

    equations.add(weight, x.T @ x / 2, tokens=2)
    solved = equations.solve(anchor_OD=anchor)

    seen = torch.linalg.pinv(x) @ x  # projector on what the tokens show
    assert torch.allclose(solved @ seen, weight @ seen, atol=1e-8)
    assert torch.allclose(solved - solved @ seen, anchor - anchor @ seen, atol=1e-8)
    assert equations.health is not None
    assert equations.health.fallback == "pseudo-inverse without 3 of 5 directions"
    assert equations.health.short_of_tokens


def test_a_ridge_pulls_to_the_anchor() -> None:
    x, weight, anchor = rows(50, 5), rows(4, 5, seed=1), rows(4, 5, seed=2)
    gram = x.T @ x / 50
    equations = NormalEquations(5, 4)

    equations.add(weight, gram)

    wanted = (weight @ gram + 0.5 * anchor) @ torch.linalg.inv(gram + 0.5 * torch.eye(5).double())
    assert torch.allclose(equations.solve(ridge=0.5, anchor_OD=anchor), wanted)
    assert torch.allclose(equations.solve(ridge=1e12, anchor_OD=anchor), anchor, atol=1e-6)


def test_nothing_folded_in_keeps_the_anchor() -> None:
    anchor = rows(4, 5)

    assert torch.equal(NormalEquations(5, 4).solve(anchor_OD=anchor), anchor)


def test_a_norm_without_shift_is_solved_for_its_scale() -> None:
    equations = NormEquations(2, shift=False)
    equations.add(torch.tensor([1.0, 3.0]), None, mean_D=torch.zeros(2), square_D=torch.ones(2))
    equations.add(torch.tensor([2.0, 5.0]), None, mean_D=torch.zeros(2), square_D=torch.ones(2) * 3)

    scale, shift = equations.solve(ridge=0.0, anchor_scale_D=torch.zeros(2), anchor_shift_D=None, floor=1e-8)

    assert shift is None
    assert torch.allclose(scale, torch.tensor([1.75, 4.5]).double())


@pytest.mark.parametrize("referenced", [False, True])
@pytest.mark.parametrize("features", [3, 600])  # 600: summed up in several row blocks
def test_shrinking_keeps_the_diagonal(features: int, referenced: bool) -> None:
    x_TD, weight_OD = torch.randn(1000, features, dtype=torch.float64), torch.randn(4, features).double()
    gram_DD = x_TD.T @ x_TD / 1000
    shrunk_DD = 0.5 * gram_DD + 0.5 * torch.diag(gram_DD.diagonal())
    reference_OD = torch.randn(4, features).double() if referenced else None
    equations = NormalEquations(features, 4, reference_OD)

    equations.add(weight_OD, gram_DD, scale=3.0, shrink=0.5)

    rhs_OD = 3 * weight_OD @ shrunk_DD
    if reference_OD is not None:
        rhs_OD = rhs_OD - reference_OD @ (3 * shrunk_DD)
    assert torch.allclose(equations.gap_OD, rhs_OD)
    assert torch.allclose(equations.lhs_DD, 3 * shrunk_DD)


def test_correlation_makes_the_diagonal_one_and_the_mass_is_that_beside_it() -> None:
    gram = torch.tensor([[4.0, 2.0, 0.0], [2.0, 9.0, 0.0], [0.0, 0.0, 0.0]])

    assert torch.allclose(correlation(gram), torch.tensor([[1, 1 / 3, 0], [1 / 3, 1, 0], [0, 0, 0]]))
    assert off_diagonal_mass(gram) == 2.0


@pytest.mark.parametrize("memory", [0, 100, 1 << 20])
def test_records_are_the_same_in_memory_and_on_disk(memory: int, tmp_path: Path) -> None:
    records = Records(tmp_path, memory=memory)
    value = (torch.arange(20.0).reshape(4, 5).T, {"mask": torch.tensor([True, False]), "n": 3}, None)

    records.put("a", value)
    records.put("b", torch.ones(50, dtype=torch.bfloat16))
    first = records.get("a")
    first[0].zero_()
    again = records.get("a")

    assert torch.equal(again[0], value[0])
    assert torch.equal(again[1]["mask"], value[1]["mask"])
    assert (again[1]["n"], again[2]) == (3, None)
    assert torch.equal(records.get("b"), torch.ones(50, dtype=torch.bfloat16))
    records.put("a", torch.zeros(1))
    assert torch.equal(records.get("a"), torch.zeros(1))
    records.close()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("factor", [1e3, 1e4])
def test_one_huge_feature_does_not_drown_the_others(factor: float) -> None:
    """Float32 sums of correlated features, one of them scaled: the solve equals the float64 oracle."""
    mixing, weights = rows(16, 16, seed=7), [rows(4, 16, seed=seed) for seed in (8, 9)]
    equations, lhs, rhs = NormalEquations(16, 4), torch.zeros(16, 16).double(), torch.zeros(4, 16).double()
    for seed, weight in enumerate(weights):
        x = (rows(4000, 16, seed=seed) @ mixing).float()
        x[:, 0] *= factor
        gram = x.T @ x / 4000
        equations.add(weight, gram, tokens=4000)
        lhs, rhs = lhs + gram.double(), rhs + weight @ gram.double()

    solved = equations.solve(anchor_OD=torch.stack(weights).mean(0))

    assert equations.health is not None
    assert equations.health.fallback == ""
    assert torch.allclose(solved, torch.linalg.solve(lhs, rhs.T).T, rtol=1e-6, atol=1e-9)


def test_what_was_given_back_cannot_be_asked_any_more():
    pool = Pool()
    moments = Moments(3, pool=pool)
    moments.add(torch.ones(4, 3))
    kept = moments.gram_DD
    moments.release()
    with pytest.raises(ValueError, match="keep a copy"):
        _ = moments.gram_DD
    assert pool.take((3, 3), dtype=torch.float32, device=kept.device) is kept


@pytest.mark.parametrize("features", [1, 7, 600, 1025])
def test_the_norm_of_a_gram_comes_with_it(features: int) -> None:
    moments, x_TD = Moments(features), rows(9, features)
    assert moments.gram_norm == 0.0
    for _ in range(2):  # asked for, and after more has been added
        moments.add(x_TD)
        assert moments.gram_norm == pytest.approx(float((x_TD.T @ x_TD / 9).norm()), rel=1e-12)
        assert torch.equal(moments.gram_DD, moments.gram_DD.T)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("first_rows", [0, 5])
def test_used_memory_brings_nothing_into_new_sums(dtype: torch.dtype, first_rows: int) -> None:
    pool, wide = Pool(), torch.float64 if dtype == torch.float64 else torch.float32
    for shape in ((600, 600), (4, 600)):
        pool.take_back(torch.full(shape, float("nan"), dtype=wide))
    x_TD = rows(5, 600).to(dtype)
    targets_TD, answers_TO = rows(5, 600, seed=1).to(dtype), rows(5, 4, seed=2).to(dtype)
    used, fresh = Moments(600, target=True, answers=4, pool=pool), Moments(600, target=True, answers=4)
    for moments in (used, fresh):
        for some in (slice(first_rows), slice(None)):
            moments.add(x_TD[some], None, targets_TD[some], answers_TO[some])

    assert torch.equal(used.gram_DD, fresh.gram_DD)
    assert bool(used.gram_DD.isfinite().all())
    assert torch.equal(used.met(torch.ones(4, 600)), fresh.met(torch.ones(4, 600)))


def test_more_can_be_added_after_the_gram_was_asked_for():
    torch.manual_seed(0)
    first_TD, second_TD = torch.randn(20, 600), torch.randn(30, 600)
    moments, whole = Moments(600), Moments(600)
    moments.add(first_TD)
    assert moments.gram_DD.shape == (600, 600)
    moments.add(second_TD)
    whole.add(torch.cat([first_TD, second_TD]))
    torch.testing.assert_close(moments.gram_DD, whole.gram_DD)
