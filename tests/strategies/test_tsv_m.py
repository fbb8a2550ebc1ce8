"""TSV-M on matrices."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from merging.spectral import decorrelated, leading_triplets, task_singular_vectors
from merging.strategies.tsv_m import TsvM

CUTOFF = 1e-6


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def truncated(matrix_OI: Tensor, rank: int) -> Tensor:
    u, s, v = torch.linalg.svd(matrix_OI, full_matrices=False)
    return u[:, :rank] * s[:rank] @ v[:rank]


def published(deltas_NOI: Tensor, rank: int) -> Tensor:
    """The formula, by plain SVDs."""
    parts = [torch.linalg.svd(delta, full_matrices=False) for delta in deltas_NOI]
    left = torch.cat([u[:, :rank] for u, _, _ in parts], dim=1)
    right = torch.cat([v[:rank] for _, _, v in parts])
    p, _, q = torch.linalg.svd(left, full_matrices=False)
    r, _, t = torch.linalg.svd(right, full_matrices=False)
    return p @ q @ torch.diag(torch.cat([s[:rank] for _, s, _ in parts])) @ r @ t


@pytest.mark.parametrize("shape", [(3, 20, 12), (4, 12, 20), (5, 16, 16), (1, 9, 7), (2, 1, 6)])
def test_plain_singular_value_decompositions_give_the_same(shape):
    deltas_NOI = drawn(0, *shape)
    rank = max(1, min(shape[1:]) // shape[0])

    merged = task_singular_vectors(deltas_NOI, rank, cutoff=CUTOFF)

    if rank * shape[0] <= min(shape[1:]):
        torch.testing.assert_close(merged, published(deltas_NOI, rank))
    torch.testing.assert_close(TsvM().merge_matrices(deltas_NOI), merged)


@given(seed=st.integers(0, 2**31), outputs=st.integers(1, 9), inputs=st.integers(1, 9))
def test_one_expert_comes_back(seed, outputs, inputs):
    delta_OI = drawn(seed, outputs, inputs)

    merged_OI = TsvM(cutoff=0).merge_matrices(delta_OI[None])

    torch.testing.assert_close(merged_OI, delta_OI, rtol=0, atol=1e-6 * float(delta_OI.norm()))


@pytest.mark.parametrize("copies", [2, 3, 5])
def test_copies_of_an_expert_give_its_leading_part(copies):
    delta_OI = drawn(0, 20, 15)

    merged_OI = TsvM().merge_matrices(delta_OI.expand(copies, -1, -1))

    torch.testing.assert_close(merged_OI, truncated(delta_OI, 15 // copies))


def test_task_vector_of_zeros_only_shortens_the_others():
    deltas_NOI = drawn(0, 3, 12, 12)
    deltas_NOI[1] = 0

    merged_OI = TsvM().merge_matrices(deltas_NOI)

    torch.testing.assert_close(merged_OI, TsvM(share=1 / 3).merge_matrices(deltas_NOI[[0, 2]]))


def test_tasks_in_orthogonal_spaces_are_added_up():
    deltas_NOI = torch.zeros(3, 12, 9, dtype=torch.float64)
    for task in range(3):
        deltas_NOI[task, 4 * task : 4 * task + 4, 3 * task : 3 * task + 3] = drawn(task, 4, 3)

    torch.testing.assert_close(TsvM().merge_matrices(deltas_NOI), deltas_NOI.sum(0))


def test_experts_of_low_rank_bring_no_arbitrary_directions():
    deltas_NOI = torch.stack([drawn(task, 20, 2) @ drawn(9 + task, 2, 16) for task in range(3)])

    merged_OI = TsvM().merge_matrices(deltas_NOI)

    torch.testing.assert_close(merged_OI, task_singular_vectors(deltas_NOI, 2, cutoff=CUTOFF))
    assert torch.linalg.matrix_rank(merged_OI) == 6


@given(
    seed=st.integers(0, 2**31),
    experts=st.integers(2, 12),
    outputs=st.integers(1, 6),
    inputs=st.integers(1, 6),
)
def test_merged_vectors_are_orthonormal_and_sizes_those_of_the_tasks(seed, experts, outputs, inputs):
    deltas_NOI = drawn(seed, experts, outputs, inputs)

    merged_OI = TsvM().merge_matrices(deltas_NOI)

    assert torch.isfinite(merged_OI).all()
    largest = torch.linalg.matrix_norm(deltas_NOI, ord=2).max()
    assert torch.linalg.matrix_norm(merged_OI, ord=2) <= largest * (1 + 1e-6)


def test_polar_factor_of_dependent_vectors_shares_their_place():
    triplets = leading_triplets(drawn(0, 8, 5), 2, cutoff=CUTOFF)

    merged_OI = decorrelated([triplets, triplets], cutoff=CUTOFF)

    torch.testing.assert_close(merged_OI, triplets.left_OK * triplets.values_K @ triplets.right_IK.T)


def test_float32_task_vectors_cost_no_digits():
    deltas_NOI = drawn(0, 4, 96, 64)
    deltas_NOI *= torch.logspace(0, -3, 64, dtype=torch.float64)

    merged_OI = TsvM().merge_matrices(deltas_NOI.float())

    exact_OI = published(deltas_NOI.float().double(), 16)
    assert (merged_OI - exact_OI).norm() < 1e-7 * exact_OI.norm()
