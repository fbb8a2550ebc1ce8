"""ISO-C on matrices."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from merging.strategies.iso_c import IsoC


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("shape", [(3, 20, 12), (2, 12, 20), (2, 16, 16), (1, 9, 7), (4, 1, 6)])
def test_plain_singular_value_decomposition_gives_the_same(shape):
    deltas_NOI = drawn(0, *shape)

    merged_OI = IsoC().merge_matrices(deltas_NOI)

    u, s, v = torch.linalg.svd(deltas_NOI.sum(0), full_matrices=False)
    torch.testing.assert_close(merged_OI, s.mean() * u @ v)


@given(
    seed=st.integers(0, 2**31), rank=st.integers(1, 5), outputs=st.integers(5, 12), inputs=st.integers(5, 12)
)
def test_spectrum_is_flat_and_its_sum_and_rank_stay(seed, rank, outputs, inputs):
    total_OI = drawn(seed, outputs, rank) @ drawn(seed + 1, rank, inputs)

    values = torch.linalg.svdvals(IsoC().merge_matrices(total_OI[None]))

    given_values = torch.linalg.svdvals(total_OI)
    kept = int((given_values > 1e-6 * given_values[0]).sum())
    torch.testing.assert_close(values[:kept], given_values.sum().div(kept).expand(kept), rtol=1e-5, atol=0)
    assert (values[kept:] < 1e-6 * values[0]).all()


def test_low_rank_experts_stored_in_float32_leave_the_null_space_empty():
    base_OI = 0.05 * drawn(0, 96, 64)
    lora_OI = 0.01 * drawn(1, 96, 4) @ drawn(2, 4, 64)
    delta_OI = (base_OI + lora_OI).float() - base_OI.float()

    merged_OI = IsoC(cutoff=1e-5).merge_matrices(delta_OI[None])

    assert torch.linalg.matrix_rank(merged_OI, rtol=1e-4) == 4


def test_task_vectors_that_cancel_give_the_base():
    delta_OI = drawn(0, 9, 7).float()
    almost_OI = -delta_OI * (1 + 1e-9)

    merged_OI = IsoC().merge_matrices(torch.stack([delta_OI, almost_OI]))

    assert not merged_OI.any()


@given(seed=st.integers(0, 2**31), outputs=st.integers(2, 9), inputs=st.integers(2, 9))
def test_rotating_the_outputs_rotates_the_result(seed, outputs, inputs):
    total_OI = drawn(seed, outputs, inputs)
    turn_OO = torch.linalg.qr(drawn(seed + 1, outputs, outputs)).Q

    turned_OI = IsoC(cutoff=0).merge_matrices((turn_OO @ total_OI)[None])

    largest = float(turned_OI.abs().max())
    torch.testing.assert_close(
        turned_OI, turn_OO @ IsoC(cutoff=0).merge_matrices(total_OI[None]), rtol=0, atol=1e-4 * largest
    )
