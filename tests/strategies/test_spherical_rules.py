"""SLERP, the Karcher mean and Model Stock."""

from __future__ import annotations

import pytest
import torch

import merging
from merging import spheres
from merging.errors import SpecError


def model(*values: float) -> dict[str, torch.Tensor]:
    return {"w": torch.tensor(values)}


@pytest.mark.parametrize(
    ("t", "expected"), [(0.0, [1.0, 0.0]), (0.5, [0.5**0.5, 0.5**0.5]), (1.0, [0.0, 1.0])]
)
def test_slerp_goes_along_the_arc_from_base_to_expert(t, expected):
    merged = merging.merge("slerp", model(1.0, 0.0), {"a": model(0.0, 1.0)}, t=t)

    assert merged["w"].tolist() == pytest.approx(expected, abs=1e-7)


def test_slerp_of_two_experts_goes_by_their_weights():
    experts = {"a": model(1.0, 0.0), "b": model(0.0, 1.0)}

    merged = merging.merge("slerp", model(9.0, 9.0), experts, weights={"a": 1, "b": 2})

    assert merged["w"].tolist() == pytest.approx([0.5, 0.75**0.5])


@pytest.mark.parametrize(
    ("experts", "options", "words"),
    [
        ("abc", {}, "one or two experts"),
        ("ab", {"t": 0.3}, 'leave out "t"'),
        ("a", {"weights": {"a": 2.0}}, 'leave out "weight"'),
        ("ab", {"weights": {"a": -1.0}}, "negative"),
    ],
)
def test_slerp_refuses_what_it_cannot_read(experts, options, words):
    with pytest.raises(SpecError, match=words):
        merging.merge("slerp", model(1.0), dict.fromkeys(experts, model(2.0)), **options)


def test_karcher_mean_of_two_is_half_way_along_the_arc():
    tensors_NS = torch.tensor([[2.0, 0.0], [0.0, 4.0]], dtype=torch.float64)

    factors_N = spheres.karcher_factors(
        tensors_NS @ tensors_NS.T, torch.ones(2).double(), iterations=10, tolerance=1e-5
    )

    assert (factors_N @ tensors_NS).tolist() == pytest.approx([3 * 0.5**0.5] * 2)


def test_karcher_mean_of_identical_experts_is_the_expert():
    expert = {"w": torch.randn(30, 20)}

    merged = merging.merge("karcher", expert, dict.fromkeys("abcde", expert))

    torch.testing.assert_close(merged["w"], expert["w"], rtol=1e-6, atol=0)


def test_karcher_mean_keeps_short_tensors_whatever_the_tolerance():
    merged = merging.merge("karcher", model(0.0, 0.0), dict.fromkeys("ab", model(3e-6, 4e-6)), tolerance=0.01)

    assert merged["w"].tolist() == pytest.approx([3e-6, 4e-6], rel=1e-6)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_slerp_between_parallel_tensors_is_linear_even_without_a_margin(sign):
    merged = merging.merge("slerp", model(1.0), {"a": model(3.0 * sign)}, t=0.5, linear_above=1.0)

    assert merged["w"].tolist() == pytest.approx([(1 + 3 * sign) / 2])


def test_karcher_mean_of_opposites_and_zeros_is_finite():
    opposites = {"a": model(1.0, 0.0), "b": model(-1.0, 0.0)}
    zeros = dict.fromkeys("ab", model(0.0, 0.0))

    assert torch.isfinite(merging.merge("karcher", model(0.0, 0.0), opposites)["w"]).all()
    assert merging.merge("karcher", model(0.0, 0.0), zeros)["w"].tolist() == [0.0, 0.0]


def test_karcher_mean_of_single_numbers_has_their_mean_length_and_the_sign_of_more_weight():
    weights = dict(zip("abcd", (0.1, 2.0, 3.0, 2.0), strict=True))
    experts = dict(zip("abcd", map(model, (0.3, -0.7, 0.9, 0.2)), strict=True))

    merged = merging.merge("karcher", model(0.0), experts, weights=weights)

    assert merged["w"].tolist() == pytest.approx([(0.03 + 1.4 + 2.7 + 0.4) / 7.1])


@pytest.mark.parametrize("tolerance", [1e-5, 1e-14])
@pytest.mark.parametrize("along", [(1.0, 0.8, -0.5), (1.0, 1.0, -1.0), (1.0, -3.0), (2.0, -0.5, -1.0, 0.1)])
def test_karcher_mean_of_tensors_on_one_line_lies_on_it(along, tolerance):
    unit_S = torch.nn.functional.normalize(torch.linspace(-1, 2, 64), dim=0)
    experts = {f"e{number}": {"w": factor * unit_S} for number, factor in enumerate(along)}
    side = sum((factor > 0) - (factor < 0) for factor in along)  # where both are as many, the first counts
    length = (1 if side >= 0 else -1) * sum(map(abs, along)) / len(along)

    merged = merging.merge("karcher", {"w": torch.zeros(64)}, experts, tolerance=tolerance)

    torch.testing.assert_close(merged["w"], length * unit_S, rtol=1e-5, atol=1e-6)


def test_karcher_mean_leaves_out_opposites_that_cancel():
    experts = {"a": model(1.0, 0.0), "b": model(-1.0, 0.0), "c": model(0.0, 1.0)}

    merged = merging.merge("karcher", model(0.0, 0.0), experts)

    assert merged["w"].tolist() == pytest.approx([0.0, 1.0], abs=1e-6)


def test_karcher_mean_of_nothing_but_an_expert_of_weight_0_is_zero():
    experts = {"a": model(1.0, 0.0), "b": model(0.0, 0.0)}

    merged = merging.merge("karcher", model(0.0, 0.0), experts, weights={"a": 0, "b": 1})

    assert merged["w"].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("along", [-3.0, 3.0])
def test_slerp_divides_by_no_sine_that_is_rounding(along):
    tensor_S = torch.randn(50, generator=torch.Generator().manual_seed(1))

    merged = merging.merge("slerp", {"w": tensor_S}, {"a": {"w": along * tensor_S}}, t=0.5, linear_above=1.0)

    torch.testing.assert_close(merged["w"], (1 + along) / 2 * tensor_S, rtol=1e-5, atol=1e-6)


def test_model_stock_of_identical_experts_is_the_expert():
    merged = merging.merge("model_stock", model(0.0, 1.0), dict.fromkeys("abc", model(3.0, -2.0)))

    assert merged["w"].tolist() == pytest.approx([3.0, -2.0])


@pytest.mark.parametrize("mean", ["cosines", "angles"])
def test_model_stock_of_orthogonal_experts_is_the_base(mean):
    experts = {"a": model(1.0, 0.0), "b": model(0.0, 1.0)}

    merged = merging.merge("model_stock", model(0.0, 0.0), experts, mean=mean)

    assert merged["w"].tolist() == pytest.approx([0.0, 0.0], abs=1e-7)


def test_model_stock_does_not_run_away_where_experts_disagree():
    experts = {"a": model(1.0, 0.001), "b": model(-1.0, 0.001)}

    merged = merging.merge("model_stock", model(0.0, 0.0), experts)

    assert merged["w"].tolist() == [0.0, 0.0]


def test_model_stock_needs_two():
    with pytest.raises(SpecError, match="at least two"):
        merging.merge("model_stock", model(1.0), {"a": model(2.0)})
