"""Arithmetic on task vectors, against plain sorts and sums."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from merging import task_vectors
from merging.contracts.vectors import Held
from merging.thresholds import magnitude_thresholds

finite = st.floats(width=32, allow_nan=False, allow_infinity=False)


def vectors(experts: int, *sizes: int, seed: int = 0) -> list[tuple[str, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [(f"w{i}", torch.randn(experts, size, generator=generator)) for i, size in enumerate(sizes)]


@pytest.mark.parametrize("density", [0.001, 0.2, 0.5, 0.77, 0.999])
def test_threshold_is_the_order_statistic_of_the_whole_vector(density):
    parts = vectors(3, 700, 1, 299)
    flat_ND = torch.cat([part for _, part in parts], dim=1)

    threshold_N = magnitude_thresholds(Held(parts), density)

    expected_N = flat_ND.abs().kthvalue(1000 - int(1000 * density), dim=1).values
    assert torch.equal(threshold_N.view(torch.float32), expected_N)


@given(st.lists(finite, min_size=1, max_size=30), st.floats(0.01, 1))
def test_threshold_is_exact_for_any_floats(values, density):
    flat_D = torch.tensor(values, dtype=torch.float32)
    rank = len(values) - int(len(values) * density)

    threshold_N = magnitude_thresholds(Held([("w", flat_D[None])]), density)

    expected = flat_D.abs().sort().values[rank - 1] if rank else torch.tensor(0.0)
    assert threshold_N.view(torch.float32).item() == expected.item()


def test_density_one_keeps_everything():
    parts = vectors(2, 50)

    threshold_N = magnitude_thresholds(Held(parts), 1.0)

    assert torch.equal(task_vectors.trim(parts[0][1], threshold_N), parts[0][1])


def test_equal_magnitudes_at_the_threshold_are_all_kept():
    deltas_NS = torch.tensor([[1.0, -1.0, 1.0, 0.5, 2.0]])

    threshold_N = magnitude_thresholds(Held([("w", deltas_NS)]), 0.2)

    assert task_vectors.trim(deltas_NS, threshold_N).tolist() == [[1.0, -1.0, 1.0, 0.0, 2.0]]


def test_all_zero_vectors_are_harmless():
    zeros_NS = torch.zeros(2, 10)

    threshold_N = magnitude_thresholds(Held([("w", zeros_NS)]), 0.2)

    assert torch.equal(task_vectors.trim(zeros_NS, threshold_N), zeros_NS)


@given(st.lists(finite, max_size=30), st.integers(0, 35))
def test_largest_keeps_exactly_so_many_and_none_smaller_than_one_left_out(values, count):
    sizes = torch.tensor(values, dtype=torch.float32).abs()

    mask = task_vectors.largest(sizes, count)

    assert int(mask.sum()) == min(count, len(values))
    if 0 < count < len(values):
        assert sizes[mask].min() >= sizes[~mask].max()


def test_of_equal_magnitudes_the_first_are_kept():
    mask = task_vectors.largest(torch.tensor([1.0, 3.0, 2.0, 2.0, 2.0]), 3)

    assert mask.tolist() == [False, True, True, True, False]


def test_a_tensor_too_small_for_the_density_keeps_its_largest_entry():
    trimmed_NS = task_vectors.trim_each(torch.tensor([[1.0, -3.0, 2.0]]), 0.2)

    assert trimmed_NS.tolist() == [[0.0, -3.0, 0.0]]


def test_sum_does_not_depend_on_where_blocks_end():
    tensors_NS = torch.randn(9, 1003)
    weights_N = torch.rand(9)

    whole_S = task_vectors.weighted_sum(tensors_NS, weights_N)
    parts = [task_vectors.weighted_sum(part_NS, weights_N) for part_NS in tensors_NS.split(7, dim=1)]

    assert torch.equal(whole_S, torch.cat(parts))


def test_largest_share_elects_by_part_of_the_norm():
    deltas_NS = torch.tensor([[10.0, -100.0], [-1.0, 1.0]])

    sign_S = task_vectors.elect_by_largest_share(deltas_NS, deltas_NS.norm(dim=1))

    assert sign_S.tolist() == [-1.0, -1.0]


def test_single_numbers_and_empty_tensors_are_counted_in_the_window_too(monkeypatch):
    monkeypatch.setattr("merging.thresholds._SAMPLED", 2)
    parts = [
        *vectors(2, 40, 40, 40, 40),
        ("scalar", torch.tensor([5.0, -5.0])),
        ("none", torch.zeros(2, 0, 3)),
    ]
    flat_ND = torch.cat([part.reshape(2, part[0].numel()) for _, part in parts], dim=1)

    threshold_N = magnitude_thresholds(Held(parts), 0.2)

    expected_N = flat_ND.abs().kthvalue(161 - int(161 * 0.2), dim=1).values
    assert torch.equal(threshold_N.view(torch.float32), expected_N)


@pytest.mark.parametrize(("how", "expected"), [("mean", 2.0), ("sum", 4.0), ("max", 3.0)])
def test_disjoint_merge_uses_only_what_agrees(how, expected):
    deltas_NS = torch.tensor([[3.0], [1.0], [-2.0], [0.0]])

    merged_S = task_vectors.disjoint_merge(deltas_NS, torch.tensor([1.0]), torch.ones(4), how)

    assert merged_S.item() == expected


@pytest.mark.parametrize("density", [0.01, 0.2, 0.9])
@pytest.mark.parametrize("sampled", ["like the rest", "unlike the rest"])
def test_a_sampled_guess_right_or_wrong_gives_the_exact_threshold(density, sampled, monkeypatch):
    monkeypatch.setattr("merging.thresholds._SAMPLED", 4)
    parts = vectors(2, *[500] * 16)
    if sampled == "unlike the rest":
        parts = [(name, part * (100 if i % 4 == 0 else 1)) for i, (name, part) in enumerate(parts)]
    flat_ND = torch.cat([part for _, part in parts], dim=1)

    threshold_N = magnitude_thresholds(Held(parts), density)

    expected_N = flat_ND.abs().kthvalue(8000 - int(8000 * density), dim=1).values
    assert torch.equal(threshold_N.view(torch.float32), expected_N)
