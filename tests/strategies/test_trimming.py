"""Trimming in row blocks: the entries that a trim of the whole tensor keeps, in any blocks, with and without
the compiled loops."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from merging.task_vectors import largest
from merging.thresholds import magnitude_bits
from merging.trimming import Trim

SHAPE = (24, 7)


def deltas(kind: str) -> Tensor:
    torch.manual_seed(0)
    values_NS = torch.randn(3, *SHAPE, dtype=torch.float64)
    if kind == "coarse":  # as of weights in bfloat16: many entries are as large as others
        values_NS = (values_NS * 4).round() / 4
    if kind == "mostly zero":
        values_NS = values_NS * (torch.rand_like(values_NS) < 0.05)
    if kind == "equal":
        values_NS = values_NS.sign()
    return values_NS


@pytest.fixture(params=["compiled", "torch"])
def _loops(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "torch":
        monkeypatch.setattr("merging.native.library", lambda: None)


@pytest.mark.usefixtures("_loops")
@pytest.mark.parametrize("height", [1, 5, 24])
@pytest.mark.parametrize("kept", [0, 1, 17, 84, 167, 168, 200])
@pytest.mark.parametrize("kind", ["smooth", "coarse", "mostly zero", "equal"])
def test_blocks_keep_what_the_whole_tensor_keeps(kind: str, kept: int, height: int) -> None:
    whole_NS = deltas(kind)
    masks = [largest(magnitude_bits(delta_S), kept) for delta_S in whole_NS]
    expected_NS = whole_NS.where(torch.stack(masks), 0)

    def blocks() -> list[Tensor]:
        return [block_NS.contiguous() for block_NS in whole_NS.clone().split(height, dim=1)]

    by_threshold, by_mask = (Trim(blocks, kept, whole_NS[0].numel()) for _ in range(2))
    reached, masked = [], []
    for block_NS in blocks():
        masked.append(block_NS.where(by_mask.mask(block_NS), 0))
        thresholds_N = by_threshold.of_block(block_NS)
        reaches_NS = magnitude_bits(block_NS) >= thresholds_N[:, None, None]
        reached.append(block_NS.where(reaches_NS, 0))

    assert torch.equal(torch.cat(masked, dim=1), expected_NS)
    assert torch.equal(torch.cat(reached, dim=1), expected_NS)


def test_a_single_number_and_an_empty_tensor_are_trimmed() -> None:
    single = Trim(lambda: [torch.tensor([2.0, -1.0], dtype=torch.float64)], 1, 1)
    empty = Trim(lambda: [torch.zeros(2, 0, dtype=torch.float64)], 1, 0)

    assert single.of_block(torch.tensor([2.0, -1.0], dtype=torch.float64)).tolist() == [0, 0]
    assert empty.of_block(torch.zeros(2, 0, dtype=torch.float64)).tolist() == [0, 0]


def test_a_first_block_unlike_the_rest_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    walks = 0
    whole_NS = deltas("smooth")
    whole_NS[:, :6] *= 100

    def blocks() -> list[Tensor]:
        nonlocal walks
        walks += 1
        return [block_NS.contiguous() for block_NS in whole_NS.split(6, dim=1)]

    trim = Trim(blocks, 84, whole_NS[0].numel())

    mask_NS = torch.cat([trim.mask(block_NS) for block_NS in blocks()], dim=1)
    assert walks == 1 + 2 + 1  # around the first block, then by counting, and this one
    assert torch.equal(mask_NS, torch.stack([largest(magnitude_bits(delta_S), 84) for delta_S in whole_NS]))


def test_blocks_of_one_kind_are_walked_over_once() -> None:
    walks = 0
    whole_NS = torch.randn(2, 200, 500, dtype=torch.float64)

    def blocks() -> list[Tensor]:
        nonlocal walks
        walks += 1
        return [block_NS.contiguous() for block_NS in whole_NS.split(50, dim=1)]

    trim = Trim(blocks, 20_000, whole_NS[0].numel())

    assert walks == 1
    masks = [trim.mask(block_NS) for block_NS in blocks()]
    assert torch.equal(torch.cat(masks, dim=1)[0], largest(magnitude_bits(whole_NS[0]), 20_000))
