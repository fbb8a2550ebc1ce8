"""CLIP of open_clip: both towers walked, fused attention solved as four linears, token weights, refusals."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from open_clip_models import backbone, built, features, texts
from tiny_models import expert_of, opened, pixels, same_data
from torch import Tensor, nn

import merging.components
from merging.backbones.open_clip import OpenClip
from merging.backbones.split_attention import SplitAttention
from merging.checkpoints.sink import StateDictSink
from merging.checkpoints.source import StateDictSource
from merging.errors import CheckpointError, TracingError
from merging.making import run_merger
from merging.records import Records
from merging.streaming import StreamedModel, load_model
from merging.tracer import BlockTracer, blocks_of, feeds_of

BOTH = [
    {"pixel_values": pixels(3)["pixel_values"], "input_ids": texts(3)},
    {"image": pixels(2, seed=1)["pixel_values"], "text": texts(2, seed=1)},
]


@pytest.mark.parametrize("custom_text", [False, True])
def test_block_by_block_from_a_stream_is_the_forward_of_open_clip(custom_text: bool) -> None:
    model, clip = built(custom_text=custom_text), backbone(custom_text=custom_text)
    source = StateDictSource(model)
    calls = [clip.forward_kwargs(batch) for batch in BOTH]
    streamed = StreamedModel(clip, source.names())
    streamed.attach(source)
    blocks = blocks_of(streamed.module, clip.stacks(streamed.module))
    streamed.load(without=[block.name for block in blocks])
    tracer = BlockTracer(streamed.module, blocks, calls, Records())

    for index, block in enumerate(blocks):
        streamed.load(block.name)
        for batch in range(len(calls)):
            tracer.record(index, batch, tracer.run(index, tracer.call(index, batch), {}))
        streamed.release(block.name)

    assert len(blocks) == 4
    for number, call in enumerate(calls):
        found, loaded = tracer.finish(number), load_model(clip, source)(**call)
        expected = features(model, call["pixel_values"], call["input_ids"])
        for walked, whole, theirs in zip(found, loaded, expected, strict=True):
            assert torch.equal(walked, whole)
            torch.testing.assert_close(walked, theirs, rtol=0, atol=1e-6)


def test_query_key_and_value_share_a_feed_and_out_proj_has_its_own() -> None:
    found = feeds_of(backbone())

    assert set(found) == {"visual.transformer.resblocks", "transformer.resblocks"}
    for feeds in found.values():
        assert [feed.linears for feed in feeds] == [
            ("attn.q_proj", "attn.k_proj", "attn.v_proj"),
            ("attn.out_proj",),
            ("mlp.c_fc",),
            ("mlp.c_proj",),
        ]


class FourLinears(OpenClip):
    """The same network, in a checkpoint that stores q, k and v by themselves."""

    def parts(self, names: tuple[str, ...]) -> dict[str, Any]:
        return {}


def taken_apart(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        path, fused, kind = name.partition("in_proj_")
        if not fused:
            found[name] = tensor
            continue
        for part, rows in zip("qkv", tensor.chunk(3), strict=True):
            found[f"{path}{part}_proj.{kind}"] = rows
    return found


def made(name: str, base: Any, experts: Any, clip: OpenClip, **settings: Any) -> dict[str, Tensor]:
    method = merging.components.strategies.get(name)
    models, data = opened(base, experts, clip), same_data(experts, *BOTH)
    sink = StateDictSink(models.base)
    with sink:
        run_merger(method(method.Settings(**settings)), models, data, sink)
    return sink.tensors


@pytest.mark.parametrize("name", ["regmean", "regmean_plus_plus", "chain_of_merges"])
def test_fused_attention_is_solved_as_the_same_network_of_four_linears(name: str) -> None:
    base = built()
    experts = {"one": expert_of(base, 1), "two": expert_of(base, 2)}
    config = backbone().config

    found = made(name, base, experts, backbone())

    apart = {task: taken_apart(expert) for task, expert in experts.items()}
    expected = made(name, taken_apart(base.state_dict()), apart, FourLinears(config))
    found = taken_apart(found)
    assert found.keys() == expected.keys()
    for tensor, value in expected.items():
        assert torch.equal(found[tensor], value), tensor


@pytest.mark.parametrize("name", ["tsv_m", "iso_c"])
def test_spectral_rules_see_one_matrix_or_three_as_the_setting_says(name: str) -> None:
    base = built()
    experts = {"one": expert_of(base, 1), "two": expert_of(base, 2)}
    fused = "visual.transformer.resblocks.0.attn.in_proj_weight"

    whole = made(name, base, experts, backbone())
    parts = made(name, base, experts, backbone(split_attention=True))

    as_stored = merging.merge(name, base, experts)
    apart = merging.merge(
        name, taken_apart(base.state_dict()), {task: taken_apart(one) for task, one in experts.items()}
    )
    torch.testing.assert_close(whole[fused], as_stored[fused], rtol=0, atol=1e-6)
    torch.testing.assert_close(
        taken_apart(parts)[fused.replace("in_proj_weight", "q_proj.weight")],
        apart[fused.replace("in_proj_weight", "q_proj.weight")],
        rtol=0,
        atol=1e-6,
    )
    assert not torch.allclose(whole[fused], parts[fused], rtol=0, atol=1e-4)
    torch.testing.assert_close(whole["visual.conv1.weight"], parts["visual.conv1.weight"])


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("mask", ["none", "added", "true_where_hidden", "per_head"])
def test_split_attention_is_multihead_attention(batch_first: bool, mask: str) -> None:
    torch.manual_seed(0)
    fused = nn.MultiheadAttention(16, 4, batch_first=batch_first).eval()
    nn.init.normal_(fused.in_proj_bias)
    split = SplitAttention(fused).eval()
    split.load_state_dict(taken_apart(fused.state_dict()))
    x, hidden = torch.randn(3, 5, 16), torch.ones(5, 5, dtype=torch.bool).triu(1)
    if not batch_first:
        x = x.transpose(0, 1)
    added = torch.zeros(5, 5).masked_fill(hidden, -torch.inf)
    masks = {"none": None, "added": added, "true_where_hidden": hidden, "per_head": added.expand(12, 5, 5)}

    with torch.no_grad():
        found = split(x, x, x, need_weights=False, attn_mask=masks[mask])[0]
        expected = fused(x, x, x, need_weights=False, attn_mask=masks[mask])[0]

    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


def test_tokens_after_the_end_of_a_text_do_not_count() -> None:
    clip, batch = backbone(), {"text": texts(4)}
    ends = batch["text"].argmax(dim=1)

    for module in ("attn.q_proj", "attn.k_proj"):
        weights = clip.token_weights(batch, "transformer.resblocks", module, (4, 16), False)
        assert weights is not None
        assert torch.equal(weights.sum(dim=1), ends + 1.0)
    last = clip.token_weights(batch, "transformer.resblocks", "attn.q_proj", (4, 16), True)
    assert last is not None
    assert torch.equal(last[torch.arange(4), ends], torch.ones(4))
    assert torch.allclose(last.sum(dim=1), 1 + 0.01 * ends)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"vision_cfg": {"layers": [1, 1, 1, 1], "width": 8, "image_size": 32}}, "ModifiedResNet"),
        (
            {"text_cfg": {"context_length": 16, "vocab_size": 99, "width": 32, "heads": 4, "qk_norm": True}},
            "CustomResidualAttentionBlock",
        ),
    ],
)
def test_towers_without_known_blocks_are_refused_by_name(changes: dict[str, Any], told: str) -> None:
    clip = backbone(**changes)

    with pytest.raises(TracingError, match=told):
        clip.stacks(clip.skeleton())


def test_a_text_tower_that_would_be_downloaded_is_refused_by_name() -> None:
    clip = backbone(text_cfg={"hf_model_name": "roberta-base"})

    with pytest.raises(CheckpointError, match='text tower of None is "roberta-base" of transformers'):
        clip.skeleton()
