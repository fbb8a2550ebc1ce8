"""Activations with less fresh memory: the same bits, and gradients where they are wanted."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers.activations import NewGELUActivation, QuickGELUActivation

from merging.lean import lean_


@pytest.mark.parametrize("activation", [NewGELUActivation, QuickGELUActivation])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_lean_activations_give_the_same_bits_and_leave_their_input(
    activation: type[nn.Module], dtype: torch.dtype
) -> None:
    x = (torch.randn(7, 5, 33, generator=torch.Generator().manual_seed(0)) * 4).to(dtype)
    before, model = x.clone(), lean_(nn.Sequential(activation()))
    usual = activation()(x)
    with torch.no_grad():
        assert torch.equal(model(x), usual)
    assert torch.equal(x, before)
    assert "forward" in model[0].__dict__


def test_lean_activations_have_gradients() -> None:
    x = torch.linspace(-3, 3, 50, requires_grad=True)
    (lean_(QuickGELUActivation())(x).sum()).backward()
    found, x.grad = x.grad, None
    QuickGELUActivation()(x).sum().backward()
    assert found is not None
    assert torch.equal(found, x.grad)


def test_other_modules_stay_as_they_are() -> None:
    model = lean_(nn.Sequential(nn.GELU(), nn.Linear(2, 2)))
    assert all("forward" not in module.__dict__ for module in model.modules())
