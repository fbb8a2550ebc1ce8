"""What runs before the first block is answered by zeros only where its values do not matter."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from merging.records import Records
from merging.stem import Tried
from merging.tracer import BlockTracer, blocks_of

COMMON = [{"ids": torch.tensor([[1, 2, 3], [4, 5, 6]])}, {"ids": torch.tensor([[6, 1], [2, 2]])}]
RARE = {"ids": torch.tensor([[1, 9, 3], [4, 5, 6]])}
MARKED = 9  # a token with a large first feature


class Embedding(nn.Embedding):
    runs = 0

    def forward(self, ids: Tensor) -> Tensor:
        self.runs += 1
        return super().forward(ids)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x_BTD: Tensor, extra_BTD: Tensor) -> Tensor:
        return x_BTD + self.linear(x_BTD).tanh() * extra_BTD


class Model(nn.Module):
    """`extra`: what blocks are handed besides, made of their number and of the embeddings."""

    def __init__(self, extra: Callable[[int, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = Embedding(10, 4)
        self.embedding.weight.data.clamp_(-3, 3)[MARKED, 0] = 30.0
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.extra = extra
        self.requires_grad_(False)

    def forward(self, ids: Tensor) -> Tensor:
        stem_BTD = x_BTD = self.embedding(ids)
        for number, block in enumerate(self.blocks):
            x_BTD = block(x_BTD, self.extra(number, stem_BTD))
        return x_BTD


def unmarked(_: int, stem_BTD: Tensor) -> Tensor:
    return (stem_BTD[..., :1] < 20).float()


def of_some_blocks(number: int, stem_BTD: Tensor) -> Tensor:
    return stem_BTD if number == 2 else torch.ones(())


def never_zero(_: int, stem_BTD: Tensor) -> Tensor:
    assert bool((stem_BTD != 0).any()), "an empty picture"
    return torch.ones(())


def nothing(_: int, stem_BTD: Tensor) -> Tensor:
    return torch.ones(())


def walked(model: Model, batches: list[dict[str, Tensor]], tried: Tried | None = None) -> list[Tensor]:
    tracer = BlockTracer(model, blocks_of(model, ["blocks"]), batches, Records(), tried=tried)
    for block in range(4):
        for batch in range(len(batches)):
            tracer.record(block, batch, tracer.run(block, tracer.call(block, batch), {}))
    return [tracer.finish(batch) for batch in range(len(batches))]


@pytest.mark.parametrize("extra", [unmarked, of_some_blocks, never_zero, nothing])
@pytest.mark.parametrize("batches", [[*COMMON, RARE], [RARE, *COMMON]])
def test_a_walk_is_the_forward_whatever_blocks_take_from_the_stem(
    extra: Callable[[int, Tensor], Tensor], batches: list[dict[str, Tensor]]
) -> None:
    model = Model(extra)

    for found, batch in zip(walked(model, batches), batches, strict=True):
        assert torch.equal(found, model(**batch))


def test_what_one_model_found_out_is_tried_on_the_batches_of_the_next() -> None:
    tried = Tried()
    walked(Model(unmarked), COMMON, tried)
    model = Model(unmarked)

    assert torch.equal(walked(model, [RARE], tried)[0], model(**RARE))


def test_the_stem_runs_once_to_be_seen_once_to_be_tried_and_at_the_end() -> None:
    model = Model(nothing)
    batches = [*COMMON, *COMMON]

    walked(model, batches)

    assert model.embedding.runs == 3 * len(batches) + 2  # blocks 2 and 3 are tried once each
