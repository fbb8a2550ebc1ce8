"""Walking a model block by block is the plain forward, bit for bit, for every kind of backbone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_models import CASES, made
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from merging.checkpoints.source import StateDictSource
from merging.errors import TracingError
from merging.measuring import Measure, TokenWeights
from merging.moments import Moments
from merging.records import Records
from merging.streaming import StreamedModel, load_model
from merging.tracer import Block, BlockTracer, blocks_of, feeds_of


def leaves(output: Any) -> list[Tensor]:
    values = dict(output) if hasattr(output, "items") else output
    return [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, Tensor)]


def walked(name: str, records: Records) -> tuple[list[Any], list[Any], BlockTracer]:
    """Outputs of the plain forward, outputs of the streamed walk, and its tracer."""
    backbone, model, batches = made(name)
    source = StateDictSource(model)
    calls = [backbone.forward_kwargs(batch) for batch in batches]
    streamed = StreamedModel(backbone, source.names())
    plain = model if type(model) is type(streamed.module) else model.base_model
    with torch.no_grad():
        expected = [plain(**call) for call in calls]
    streamed.attach(source)
    blocks = blocks_of(streamed.module, backbone.stacks(streamed.module))
    streamed.load(without=[block.name for block in blocks])
    tracer = BlockTracer(streamed.module, blocks, calls, records)
    for index, block in enumerate(blocks):
        streamed.load(block.name)
        for batch in range(len(calls)):
            tracer.record(index, batch, tracer.run(index, tracer.call(index, batch), {}))
        streamed.release(block.name)
        assert all(parameter.is_meta for parameter in block.module.parameters())
    return expected, [tracer.finish(batch) for batch in range(len(calls))], tracer


@pytest.mark.parametrize("name", CASES)
def test_block_by_block_from_a_stream_equals_the_plain_forward_exactly(name: str) -> None:
    expected, found, _ = walked(name, Records())

    for ours, theirs in zip(found, expected, strict=True):
        assert len(leaves(ours)) == len(leaves(theirs)) > 0
        for left, right in zip(leaves(ours), leaves(theirs), strict=True):
            assert torch.equal(left, right)


def test_records_on_disk_change_nothing() -> None:
    with_disk = Records(memory=0)
    expected, found, _ = walked("llama", with_disk)

    assert with_disk.bytes_in_memory == 0
    assert all(torch.equal(ours.logits, theirs.logits) for ours, theirs in zip(found, expected, strict=True))
    with_disk.close()


@pytest.mark.parametrize("name", CASES)
def test_a_whole_model_loaded_from_its_tensors_gives_the_same_output(name: str) -> None:
    backbone, model, batches = made(name)
    loaded = load_model(backbone, StateDictSource(model))
    plain = model if type(model) is type(loaded) else model.base_model

    with torch.no_grad():
        found, expected = (each(**backbone.forward_kwargs(batches[0])) for each in (loaded, plain))

    assert all(torch.equal(a, b) for a, b in zip(leaves(found), leaves(expected), strict=True))


@pytest.mark.parametrize("name", ["clip", "llama"])
def test_forwards_and_hooks_are_restored_after_an_error(name: str) -> None:
    backbone, model, batches = made(name)
    blocks = blocks_of(model, backbone.stacks(model))
    tracer = BlockTracer(model, blocks, [backbone.forward_kwargs(batches[0])], Records())
    linear = next(path for path, part in blocks[0].module.named_modules() if isinstance(part, nn.Linear))
    expected = model(**tracer.batches[0])

    def fail(x: Tensor) -> None:
        raise RuntimeError("an observer fails")

    with pytest.raises(RuntimeError, match="an observer fails"):
        tracer.run(0, tracer.call(0, 0), {linear: fail})
    with pytest.raises(TracingError, match=r"failed on a model, batch 0 \(no_such_argument \(1,\)\)"):
        BlockTracer(model, blocks, [{"no_such_argument": torch.zeros(1)}], Records()).call(0, 0)

    assert not any("forward" in module.__dict__ for module in model.modules())
    assert not any(module._forward_pre_hooks for module in model.modules())
    found = model(**tracer.batches[0])
    assert all(torch.equal(a, b) for a, b in zip(leaves(found), leaves(expected), strict=True))


def test_an_instance_forward_set_by_others_comes_back() -> None:
    backbone, model, batches = made("vit")
    blocks = blocks_of(model, backbone.stacks(model))
    theirs = blocks[1].module.forward
    blocks[1].module.forward = theirs
    tracer = BlockTracer(model, blocks, [backbone.forward_kwargs(batches[0])], Records())

    tracer.record(0, 0, tracer.run(0, tracer.call(0, 0), {}))
    tracer.call(1, 0)

    assert blocks[1].module.__dict__["forward"] == theirs


def test_a_block_that_is_never_reached_is_named() -> None:
    class Skips(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])

        def forward(self, x: Tensor) -> Tensor:
            return self.blocks[0](x)

    model = Skips()
    tracer = BlockTracer(model, blocks_of(model, ["blocks"]), [{"x": torch.ones(1, 2)}], Records())
    tracer.record(0, 0, tracer.run(0, tracer.call(0, 0), {}))

    with pytest.raises(TracingError, match=r'without reaching block "blocks\.1"'):
        tracer.call(1, 0)


def test_a_call_can_be_asked_for_again_even_if_a_block_edits_its_input_in_place() -> None:
    class Edits(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.mul_(2.0)

    class Chain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([Edits(), Edits(), Edits()])

        def forward(self, x: Tensor) -> Tensor:
            x = x + 0
            for block in self.blocks:
                x = block(x)
            return x

    model = Chain()
    tracer = BlockTracer(model, blocks_of(model, ["blocks"]), [{"x": torch.ones(3)}], Records())
    for index in range(3):
        tracer.run(index, tracer.call(index, 0), {})
        tracer.record(index, 0, tracer.run(index, tracer.call(index, 0), {}))

    assert torch.equal(tracer.finish(0), torch.full((3,), 8.0))


def test_linears_with_one_input_share_a_feed() -> None:
    backbone, model, batches = made("llama")
    blocks = blocks_of(model, backbone.stacks(model))
    tracer = BlockTracer(model, blocks, [backbone.forward_kwargs(batches[0])], Records())

    layout = tracer.layout(0, 0)

    assert [feed.linears for feed in layout.feeds] == [
        ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        ("self_attn.o_proj",),
        ("mlp.gate_proj", "mlp.up_proj"),
        ("mlp.down_proj",),
    ]
    assert layout.norms == ("input_layernorm", "post_attention_layernorm")


@pytest.mark.parametrize("name", CASES)
def test_feeds_are_found_without_reading_weights(name: str) -> None:
    backbone, model, batches = made(name)
    real = load_model(backbone, StateDictSource(model))
    blocks = blocks_of(real, backbone.stacks(real))
    tracer = BlockTracer(real, blocks, [backbone.forward_kwargs(batches[0])], Records())

    found = feeds_of(backbone)

    assert tuple(found) == backbone.stacks(real)
    assert [feed.linears for feed in found[blocks[0].stack]] == [
        feed.linears for feed in tracer.layout(0, 0).feeds
    ]


def _all_alike(block: Block) -> TokenWeights:
    backbone, _, batches = made("clip")
    return TokenWeights(backbone, batches[0], block, reads_out=False)


class _Editing(nn.Module):
    """Reads its input by two linears, and changes it in between or afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        early = self.first(x)
        x.mul_(2.0)
        return early + self.second(x) + self.third(early)


class _OneBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([_Editing()])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x + 0)
        return x


def test_a_tensor_that_was_edited_in_place_is_another_feed() -> None:
    model = _OneBlock()
    tracer = BlockTracer(model, blocks_of(model, ["blocks"]), [{"x": torch.ones(3, 4)}], Records())

    layout = tracer.layout(0, 0)

    assert [feed.linears for feed in layout.feeds] == [("first",), ("second",), ("third",)]
    assert layout.untouched == {"second", "third"}


def test_inputs_are_measured_as_they_were_before_the_block_edits_them() -> None:
    model = _OneBlock()
    block = blocks_of(model, ["blocks"])[0]
    x = torch.arange(12.0).reshape(3, 4)
    tracer = BlockTracer(model, [block], [{"x": x}], Records())
    layout = tracer.layout(0, 0)
    moments = {feed: Moments(4, target=True) for feed in layout.feeds}
    weights = _all_alike(block)
    measure = Measure(block, moments, {}, {}, weights, layout.untouched)

    tracer.run(0, tracer.call(0, 0), measure.keepers())
    tracer.run(0, tracer.call(0, 0), measure.pairers())

    found = {feed.linears[0]: one.cross_DD for feed, one in moments.items()}
    assert torch.allclose(found["first"], x.T @ x / 3)
    assert torch.allclose(found["second"], 4 * x.T @ x / 3)


def test_a_kept_input_that_is_edited_after_all_is_an_error() -> None:
    model = _OneBlock()
    block = blocks_of(model, ["blocks"])[0]
    tracer = BlockTracer(model, [block], [{"x": torch.ones(3, 4)}], Records())
    moments = {feed: Moments(4, target=True) for feed in tracer.layout(0, 0).feeds}
    weights = _all_alike(block)
    measure = Measure(block, moments, {}, {}, weights, untouched={"first", "second", "third"})

    tracer.run(0, tracer.call(0, 0), measure.keepers())

    with pytest.raises(TracingError, match=r'"blocks\.0" changes the input of "first" in place'):
        tracer.run(0, tracer.call(0, 0), measure.pairers())
