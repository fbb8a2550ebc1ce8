"""The compiled inner loops give the bits of the torch code that runs where they are missing."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from merging import native
from merging.checkpoints.rounding import rounded
from merging.sparsifying import drop_
from merging.task_vectors import balance, elect_and_merge, weighted_sum
from merging.thresholds import magnitude_thresholds

pytestmark = pytest.mark.skipif(
    native.library() is None, reason="installed without a C compiler: there is only the torch code"
)
SHAPES = [(1,), (7,), (513,), (3, 1000), (64, 129)]


@pytest.fixture
def both(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], Tensor]], tuple[Tensor, Tensor]]:
    """What a function gives with the compiled code, and what without."""

    def run(function: Callable[[], Tensor]) -> tuple[Tensor, Tensor]:
        compiled = function()
        with monkeypatch.context() as patch:
            patch.setattr(native, "library", lambda: None)
            return compiled, function()

    return run


def deltas(shape: tuple[int, ...], models: int = 3, *, grid: bool = True) -> Tensor:
    """With a coarse grid, so that entries cancel, agree and are zero."""
    torch.manual_seed(len(shape) + models)
    drawn = torch.randn(models, *shape, dtype=torch.float64)
    return (drawn * 2).round() / 2 if grid else drawn


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("weights", [[1.0], [0.3, -0.7, 1.1], [1.0, 1.0]])
@pytest.mark.parametrize("divisor", [1, 3.0])
def test_weighted_sums(both, shape, weights, divisor):
    tensors_NS = deltas(shape, len(weights), grid=False)
    weights_N = torch.tensor(weights, dtype=torch.float64)
    compiled, plain = both(lambda: weighted_sum(tensors_NS, weights_N, divisor))
    assert torch.equal(compiled, plain)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("how", ["mean", "sum"])
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("weights", [[1.0, 1.0, 1.0], [0.5, 1.0, 0.25]])
def test_ties(both, shape, how, sign, weights):
    deltas_NS, weights_N = deltas(shape), torch.tensor(weights, dtype=torch.float64)
    thresholds_N = torch.tensor([1.0, 0.5, 0.0]).view(torch.int32)
    compiled, plain = both(lambda: elect_and_merge(deltas_NS, thresholds_N, weights_N, how, lambda: sign))
    assert torch.equal(compiled, plain)
    compiled, plain = both(lambda: torch.tensor(balance(deltas_NS, thresholds_N, weights_N)))
    assert torch.equal(compiled, plain)


def test_the_majority_is_asked_for_only_where_experts_cancel():
    def unwanted() -> int:
        raise AssertionError

    ones_N, thresholds_N = torch.ones(2, dtype=torch.float64), torch.zeros(2, dtype=torch.int32)
    apart = torch.tensor([[1.0, 2.0], [3.0, 0.5]], dtype=torch.float64)
    assert elect_and_merge(apart, thresholds_N, ones_N, "sum", unwanted).tolist() == [4.0, 2.5]
    cancelling = torch.tensor([[1.0, 2.0], [-1.0, 0.5]], dtype=torch.float64)
    assert elect_and_merge(cancelling, thresholds_N, ones_N, "sum", lambda: -1).tolist() == [-1.0, 2.5]


@pytest.mark.parametrize("rescale", ["expectation", "none", "norm"])
def test_random_drops(both, rescale):
    deltas_NS = deltas((33, 65), grid=False)
    keep_NS = torch.rand(deltas_NS.shape) < 0.4
    compiled, plain = both(lambda: drop_(deltas_NS.clone(), keep_NS, 0.4, rescale))
    assert torch.equal(compiled, plain)


class Walked:
    """Blocks of task vectors in memory, as many as make a sample worth while."""

    def __init__(self, blocks: list[Tensor]) -> None:
        self._blocks = blocks
        self.experts = [str(index) for index in range(len(blocks[0]))]

    def visit(self, action, *, every=1):
        for block in self._blocks[::every]:
            action("w", block)

    def count(self):
        return len(self._blocks)

    def total_(self, sums):
        return sums

    def gathered(self, parts):
        return parts


@pytest.mark.parametrize("density", [0.01, 0.2, 0.9])
def test_thresholds(both, density):
    torch.manual_seed(0)
    blocks = [torch.randn(3, 1000, dtype=torch.float64) for _ in range(150)]
    compiled, plain = both(lambda: magnitude_thresholds(Walked(blocks), density))
    assert torch.equal(compiled, plain)
    entries = torch.cat(blocks, dim=1)[0].float().abs().sort().values
    rank = len(entries) - int(len(entries) * density)
    assert int(compiled[0]) == int(entries[rank - 1].view(torch.int32))


def test_rounding(both):
    torch.manual_seed(0)
    ties = 1 + 2.0**-8 * torch.tensor([1.0, 3.0, 5.0], dtype=torch.float64)
    tiny = 2.0 ** torch.arange(-150.0, -120.0, dtype=torch.float64)
    values = torch.cat([ties, ties + 2.0**-40, -ties - 2.0**-45, tiny, tiny * (1 + 2.0**-40), tiny * -1.5])
    values = torch.cat([values, torch.zeros(3, dtype=torch.float64), torch.randn(5000, dtype=torch.float64)])
    compiled, plain = both(lambda: rounded(values, torch.bfloat16, name="w").view(torch.int16))
    assert torch.equal(compiled, plain)


def test_values_that_are_not_finite_are_rounded_alike(both):
    values = torch.tensor([float("nan"), float("inf"), -float("inf"), 1e300, 3.4e38], dtype=torch.float64)
    compiled, plain = both(
        lambda: rounded(values, torch.bfloat16, name="w", allow_nonfinite=True).view(torch.int16)
    )
    assert torch.equal(compiled, plain)


def test_products():
    models_MS = deltas((37, 41), 4, grid=False)
    flat = models_MS.flatten(1)
    torch.testing.assert_close(native.products(models_MS), flat @ flat.T, rtol=1e-13, atol=1e-12)


def test_models_that_lie_apart_in_memory():
    rows_NS = deltas((20, 30), grid=False)[:, :7]  # the first rows of each
    assert not rows_NS.is_contiguous()
    assert native.stacked(rows_NS)
    assert torch.equal(weighted_sum(rows_NS), rows_NS[0] + rows_NS[1] + rows_NS[2])
    assert not native.stacked(deltas((20, 30), grid=False)[:, :, :7])
