"""FeatCal's split of drift: what a block does itself, and what it passes on from the blocks before it."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import T5Config, T5ForConditionalGeneration

from merging.backbones.t5 import T5
from merging.checkpoints.source import StateDictSource as source
from merging.evaluation.drift import drift

TEXTS = {
    "input_ids": torch.tensor([[5, 6, 7, 2], [8, 9, 2, 0], [3, 4, 5, 2], [6, 2, 0, 0], [7, 8, 9, 2]]),
    "decoder_input_ids": torch.tensor([[0, 3, 4], [0, 5, 6], [0, 7, 8], [0, 9, 3], [0, 4, 5]]),
}
TEXTS["attention_mask"] = (TEXTS["input_ids"] != 0).long()


def images(count, seed=0):
    random = torch.Generator().manual_seed(seed)
    return [{"pixel_values": torch.randn(count, 3, 32, 32, generator=random)}]


def entering(model, backbone, batch):
    """Hidden states before each block and after the last, and the blocks."""
    (stack,) = backbone.stacks(model)
    blocks = list(model.get_submodule(stack).children())
    seen = []
    hooks = [
        block.register_forward_hook(
            lambda _, args, kwargs, output: seen.append(
                (
                    args[0] if args else kwargs["hidden_states"],
                    output[0] if isinstance(output, tuple) else output,
                )
            ),
            with_kwargs=True,
        )
        for block in blocks
    ]
    with torch.no_grad():
        model(**batch)
    for hook in hooks:
        hook.remove()
    return blocks, seen


def answered(block, hidden):
    with torch.no_grad():
        try:
            found = block(hidden)
        except TypeError:  # CLIP's blocks want a mask, which pictures do not have
            found = block(hidden, None)
    return (found[0] if isinstance(found, tuple) else found).double()


def test_local_and_upstream_are_those_of_the_definition(tower):
    backbone, model = tower
    expert, merged = model(0), model(1)
    (batch,) = images(5)

    rows = drift(source(expert), {"merged": source(merged)}, backbone, [batch])["merged"].blocks

    _, theirs = entering(expert, backbone, batch)
    blocks, ours = entering(merged, backbone, batch)
    for block, (before, after), (_, mine), row in zip(blocks, theirs, ours, rows, strict=True):
        expected, mine, crossed = after.double(), mine.double(), answered(block, before)
        local, upstream, error = crossed - expected, mine - crossed, mine - expected
        size = expected.norm(dim=-1)
        assert row.local == pytest.approx((local.norm(dim=-1) / size).mean().item(), rel=1e-5)
        assert row.upstream == pytest.approx((upstream.norm(dim=-1) / size).mean().item(), rel=1e-5)
        assert row.local_share == pytest.approx(
            ((local * error).sum() / error.square().sum()).item(), rel=1e-4
        )
        torch.testing.assert_close(local + upstream, error)


def test_the_parts_add_up_to_no_less_than_the_drift(tower):
    backbone, model = tower

    rows = drift(source(model(0)), {"merged": source(model(1))}, backbone, images(5))["merged"].blocks

    for row in rows:
        assert abs(row.local - row.upstream) <= row.distance <= row.local + row.upstream


def test_an_expert_against_itself_has_none_of_it(tower):
    backbone, model = tower

    found = drift(source(model(0)), {"merged": source(model(0))}, backbone, images(5), frechet=True)["merged"]

    for row in found.blocks:
        assert (row.distance, row.local, row.upstream, row.frechet) == (0, 0, 0, 0)
        assert row.local_share is None
    assert found.output.distances == (0,) * 5
    assert found.output.cosines == pytest.approx((1,) * 5, abs=1e-12)


def test_a_changed_block_is_local_there_and_upstream_behind(tower):
    backbone, model = tower
    expert = model(0)
    merged = copy.deepcopy(expert)
    with torch.no_grad():
        for parameter in merged.get_submodule(f"{backbone.stacks(merged)[0]}.0").parameters():
            parameter.mul_(1.5)

    first, second = drift(source(expert), {"merged": source(merged)}, backbone, images(3))["merged"].blocks

    assert first.local == pytest.approx(first.distance)
    assert (first.upstream, first.local_share) == (0, 1)
    assert second.upstream == pytest.approx(second.distance)
    assert (second.local, second.local_share) == (0, 0)


def test_changed_embeddings_are_upstream_of_the_first_block(tower):
    backbone, model = tower
    expert = model(0)
    merged = copy.deepcopy(expert)
    inside = tuple(f"{stack}." for stack in backbone.stacks(merged))
    with torch.no_grad():
        for name, parameter in merged.named_parameters():
            if not name.startswith(inside):
                parameter.mul_(1.5)

    first, *_ = drift(source(expert), {"merged": source(merged)}, backbone, images(3))["merged"].blocks

    assert first.local == 0
    assert first.upstream == pytest.approx(first.distance)
    assert first.distance > 0.01


def test_an_encoder_decoder_in_batches_of_any_size():
    """Five texts go through a few at a time; what enters a decoder's block is all the expert's, its encoder's
    states, too."""
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "vocab_size": 64}
    config = T5Config(**sizes, architectures=["T5ForConditionalGeneration"], tie_word_embeddings=True)
    models = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        models.append(T5ForConditionalGeneration(config).eval())
    expert, other = models
    merged = copy.deepcopy(expert)
    with torch.no_grad():
        for name, parameter in merged.encoder.named_parameters():
            if name.startswith("block"):
                parameter.copy_(other.encoder.get_parameter(name))

    found = drift(source(expert), {"merged": source(merged)}, T5(config), [TEXTS])["merged"]

    rows = {row.block: row for row in found.blocks}
    assert rows["encoder.block.0"].local == pytest.approx(rows["encoder.block.0"].distance)
    assert rows["decoder.block.0"].local == rows["decoder.block.1"].local == 0
    assert rows["decoder.block.0"].upstream > 1e-4
    assert len(found.output.distances) == 5
    with torch.no_grad():
        mask = {**TEXTS, "use_cache": False}
        ours, theirs = (one(**mask).logits[:, -1].double() for one in (merged, expert))
    expected = (ours - theirs).norm(dim=-1) / theirs.norm(dim=-1)
    assert found.output.distances == pytest.approx(tuple(expected.tolist()), rel=1e-4)


def test_the_final_features_are_those_that_heads_read(tower):
    backbone, model = tower
    expert, merged, (batch,) = model(0), model(1), images(5)

    found = drift(source(expert), {"merged": source(merged)}, backbone, [batch])["merged"].output

    with torch.no_grad():
        ours, theirs = (backbone.features(one(**batch), batch).double() for one in (merged, expert))
    expected = ((ours - theirs).norm(dim=-1) / theirs.norm(dim=-1)).tolist()
    assert found.distances == pytest.approx(tuple(expected), rel=1e-5)
    assert found.cosines == pytest.approx(tuple(torch.cosine_similarity(ours, theirs).tolist()), abs=1e-6)


def test_what_inference_does_to_features_is_done_to_them(tower):
    backbone, model = tower
    expert = model(0)
    (batch,) = images(3)
    with torch.no_grad():
        features = backbone.features(expert(**batch), batch)

    found = drift(
        source(expert),
        {"merged": source(model(1)), "calibrated": source(model(1))},
        backbone,
        [batch],
        adapt={"calibrated": lambda _: features},
    )

    assert max(found["calibrated"].output.distances) < 1e-6
    assert min(found["merged"].output.distances) > 0.01
    assert found["calibrated"].blocks == found["merged"].blocks


def test_frechet_is_measured_where_asked(tower):
    backbone, model = tower
    sources = source(model(0)), {"merged": source(model(1))}

    plain = drift(*sources, backbone, images(3))["merged"].blocks
    full = drift(*sources, backbone, images(3), frechet=True)["merged"].blocks

    assert {row.frechet for row in plain} == {None}
    assert all(row.frechet_relative > 0 for row in full)
    assert [row.distance for row in plain] == [row.distance for row in full]
