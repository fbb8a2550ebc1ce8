"""DELLA, Breadcrumbs and SCE."""

from __future__ import annotations

import pytest
import torch

import merging
from merging import sparsifying
from merging.errors import SpecError


def test_della_keeps_larger_entries_more_often():
    deltas_NS = torch.tensor([[[0.1, -0.4, 0.2, 0.3]]])

    probability_NS = sparsifying.rank_probabilities(deltas_NS, 0.5, 0.15)

    torch.testing.assert_close(probability_NS, torch.tensor([[[0.35, 0.65, 0.45, 0.55]]]))


def test_della_ranks_the_rows_of_a_matrix_and_a_vector_as_one():
    matrix_NS = torch.tensor([[[1.0, 2.0], [40.0, 30.0]]])

    of_rows_NS = sparsifying.rank_probabilities(matrix_NS, 0.5, 0.25)
    of_vector_NS = sparsifying.rank_probabilities(matrix_NS[:, 0], 0.5, 0.25)

    assert of_rows_NS.tolist() == [[[0.25, 0.75], [0.75, 0.25]]]
    assert of_vector_NS.tolist() == [[0.25, 0.75]]


@pytest.mark.parametrize("shape", [(1,), (5, 1), ()])
def test_della_rows_of_one_entry_are_kept_with_the_density(shape):
    assert sparsifying.rank_probabilities(torch.ones(2, *shape), 0.5, 0.1).unique().tolist() == [0.5]


def test_della_expectation_is_the_task_vector():
    base, expert = {"w": torch.zeros(4, 50)}, {"w": torch.linspace(1, 2, 200).view(4, 50)}

    draws = [merging.merge("della", base, {"a": expert}, seed=seed)["w"] for seed in range(300)]

    torch.testing.assert_close(torch.stack(draws).mean(), expert["w"].mean(), rtol=0.02, atol=0)


def test_della_refuses_an_epsilon_that_leaves_the_unit_interval():
    base = {"w": torch.zeros(4)}

    with pytest.raises(SpecError, match="between 0 and 1"):
        merging.merge("della", base, {"a": base}, density=0.9, epsilon=0.15)


@pytest.mark.parametrize(
    ("density", "gamma", "kept"),
    [
        (0.5, 0.2, [4, 5, 6, 7, 8]),
        (0.5, 0.0, [6, 7, 8, 9, 10]),
        (0.5, 0.05, [6, 7, 8, 9, 10]),  # no entry is cut above, and the rest stays
        (0.9, 0.3, [1, 2, 3, 4, 5, 6, 7, 8, 9]),  # the upper cut shrinks to what the density allows
        (1.0, 0.3, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]),
    ],
)
def test_breadcrumbs_cuts_both_ends(density, gamma, kept):
    base = {"w": torch.zeros(10)}
    expert = {"w": torch.tensor([3.0, -1.0, 7.0, 2.0, -10.0, 5.0, 6.0, -4.0, 8.0, 9.0])}

    left_S = merging.merge("breadcrumbs", base, {"a": expert}, density=density, gamma=gamma, scale=1.0)["w"]

    assert sorted(left_S[left_S != 0].abs().tolist()) == kept


def test_breadcrumbs_keeps_small_tensors():
    base, expert = {"b": torch.zeros(10)}, {"b": torch.arange(1.0, 11)}

    merged = merging.merge("breadcrumbs", base, {"a": expert}, scale=1.0)

    assert merged["b"].tolist() == [0.0, *range(2, 11)]


def test_sce_selects_where_experts_differ():
    deltas_NS = torch.tensor([[1.0, 1.0, 5.0, 0.0], [1.0, 2.0, -5.0, 0.5]])

    assert sparsifying.most_varying(deltas_NS, 0.7).tolist() == [False, True, True, False]


def test_sce_of_identical_experts_is_the_base_in_its_own_shape():
    base, expert = {"w": torch.zeros(3, 2)}, {"w": torch.full((3, 2), 0.1)}

    merged = merging.merge("sce", base, dict.fromkeys("abcdefg", expert), density=0.5)

    assert torch.equal(merged["w"], base["w"])


def test_sce_weighs_by_energy_however_small():
    base = {"w": torch.zeros(2)}
    experts = {"a": {"w": torch.tensor([1e-5, 0.0])}, "b": {"w": torch.tensor([3e-5, 0.0])}}

    merged = merging.merge("sce", base, experts)

    assert merged["w"][0].item() == pytest.approx(0.1 * 1e-5 + 0.9 * 3e-5)
