"""WUDI on matrices."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import merging
from merging.strategies.wudi import Wudi


def drawn(seed: int, *shape: int) -> Tensor:
    return 0.002 * torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def interference(merged_OI: Tensor, deltas_NOI: Tensor) -> Tensor:
    """The loss as published."""
    norms_N = deltas_NOI.flatten(1).norm(dim=1).square()
    products_NOO = (merged_OI - deltas_NOI) @ deltas_NOI.transpose(1, 2)
    return (products_NOO.flatten(1).square().sum(1) / norms_N).sum()


@pytest.mark.parametrize("shape", [(3, 20, 12), (2, 12, 20), (4, 1, 6), (3, 8, 1)])
def test_autograd_through_the_loss_gives_the_same(shape):
    deltas_NOI = drawn(0, *shape)
    merged_OI = deltas_NOI.sum(0).requires_grad_()
    optimizer = torch.optim.Adam([merged_OI], lr=1e-5)
    for _ in range(40):
        optimizer.zero_grad()
        interference(merged_OI, deltas_NOI).backward()
        optimizer.step()

    ours_OI = Wudi(steps=40).merge_matrices(deltas_NOI)

    torch.testing.assert_close(ours_OI, merged_OI.detach(), rtol=1e-6, atol=1e-10)


def test_no_steps_give_the_sum():
    deltas_NOI = drawn(0, 3, 9, 7)

    assert torch.equal(Wudi(steps=0).merge_matrices(deltas_NOI), deltas_NOI.sum(0))


def test_one_expert_comes_back():
    delta_OI = drawn(0, 9, 7)

    assert torch.equal(Wudi().merge_matrices(delta_OI[None]), delta_OI)


def test_steps_lessen_the_interference_and_stay_within_reach():
    deltas_NOI = drawn(0, 4, 16, 12)
    sum_OI = deltas_NOI.sum(0)

    merged_OI = Wudi().merge_matrices(deltas_NOI)

    assert interference(merged_OI, deltas_NOI) < 0.5 * interference(sum_OI, deltas_NOI)
    assert (merged_OI - sum_OI).abs().max() < 1.1 * 300 * 1e-5


def test_task_vector_of_zeros_changes_nothing():
    deltas_NOI = drawn(0, 3, 9, 7)
    deltas_NOI[1] = 0

    merged_OI = Wudi().merge_matrices(deltas_NOI)

    assert torch.equal(merged_OI, Wudi().merge_matrices(deltas_NOI[[0, 2]]))


@pytest.mark.parametrize("size", [1e-30, 1e15])
def test_task_vectors_of_any_magnitude_are_finite(size):
    deltas_NOI = (size * drawn(0, 3, 9, 7)).float()

    assert torch.isfinite(Wudi(steps=20).merge_matrices(deltas_NOI)).all()


def test_embeddings_and_heads_stay_the_bases():
    names = {
        "model.embed_tokens.weight": True,
        "model.layers.0.mlp.down_proj.weight": False,
        "lm_head.weight": True,
        "model.layers.0.mlp.shared_expert.up_proj.weight": False,
        "vision_model.encoder.layers.0.self_attn.out_proj.weight": False,
        "visual_projection.weight": True,
    }
    base = {name: torch.zeros(6, 4) for name in names}
    expert = {name: drawn(0, 6, 4).float() for name in names}

    merged = merging.merge("wudi", base, {"a": expert, "b": expert})

    assert {name: not bool(tensor.any()) for name, tensor in merged.items()} == names
