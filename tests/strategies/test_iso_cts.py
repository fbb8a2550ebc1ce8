"""ISO-CTS on matrices."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from merging.spectral import specific_rank
from merging.strategies.iso_c import IsoC
from merging.strategies.iso_cts import IsoCts


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def published(deltas_NOI: Tensor, common: int, specific: int) -> Tensor:
    """The formula, by plain SVDs."""
    u, s, v = torch.linalg.svd(deltas_NOI.sum(0), full_matrices=False)
    shared = u[:, :common]
    parts = [torch.linalg.svd(delta - shared @ shared.T @ delta, full_matrices=False) for delta in deltas_NOI]
    left = torch.cat([*[u[:, :specific] for u, _, _ in parts], shared], dim=1)
    right = torch.cat([*[v[:specific] for _, _, v in parts], v[:common]])
    sizes = torch.cat([*[s[:specific] for _, s, _ in parts], s[:common]])
    p, _, q = torch.linalg.svd(left, full_matrices=False)
    r, _, t = torch.linalg.svd(right, full_matrices=False)
    return sizes.mean() * p @ q @ r @ t


@pytest.mark.parametrize("shape", [(3, 20, 12), (2, 12, 20), (4, 32, 32)])
@pytest.mark.parametrize("common", [0.0, 0.3, 0.8])
def test_plain_singular_value_decompositions_give_the_same(shape, common):
    deltas_NOI = drawn(0, *shape)
    size, experts = min(shape[1:]), shape[0]
    specific = min(round((size - int(size * common)) / experts), size // experts)

    merged_OI = IsoCts(common=common).merge_matrices(deltas_NOI)

    torch.testing.assert_close(merged_OI, published(deltas_NOI, size - experts * specific, specific))


def test_with_common_directions_only_it_is_iso_c():
    deltas_NOI = drawn(0, 3, 20, 12)

    merged_OI = IsoCts(common=1.0).merge_matrices(deltas_NOI)

    torch.testing.assert_close(merged_OI, IsoC().merge_matrices(deltas_NOI))


@given(
    seed=st.integers(0, 2**31), experts=st.integers(1, 9), outputs=st.integers(1, 9), inputs=st.integers(1, 9)
)
def test_any_number_of_experts_on_any_matrix_is_finite(seed, experts, outputs, inputs):
    merged_OI = IsoCts().merge_matrices(drawn(seed, experts, outputs, inputs))

    assert torch.isfinite(merged_OI).all()


def test_experts_of_low_rank_bring_no_arbitrary_directions():
    deltas_NOI = torch.stack([drawn(task, 40, 2) @ drawn(9 + task, 2, 30) for task in range(3)])

    merged_OI = IsoCts().merge_matrices(deltas_NOI)

    assert torch.linalg.matrix_rank(merged_OI, rtol=1e-6) <= 6


@given(size=st.integers(1, 900), experts=st.integers(1, 40), fraction=st.floats(0, 1))
def test_tasks_never_get_more_directions_than_there_are(size, experts, fraction):
    specific = specific_rank(size, experts, fraction)

    assert 0 <= experts * specific <= size
    assert fraction != 1 or specific == 0


def test_one_task_and_eight_share_768_directions_as_published():
    assert specific_rank(768, 8, 0.8) == 19  # 768 - 8 * 19 = 616 common
    assert specific_rank(12, 8, 0.8) == 0  # round(3 / 8)
