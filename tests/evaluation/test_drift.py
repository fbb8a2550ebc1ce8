from __future__ import annotations

import copy

import pytest
import torch
from transformers import BertConfig, BertModel

from merging.backbones.transformers import AnyTransformers
from merging.checkpoints.source import StateDictSource as source
from merging.errors import TracingError
from merging.evaluation.drift import block_features, drift


def images(*sizes, seed=0):
    random = torch.Generator().manual_seed(seed)
    return [{"pixel_values": torch.randn(size, 3, 32, 32, generator=random)} for size in sizes]


def test_a_model_does_not_drift_from_itself(tower):
    backbone, model = tower

    rows = drift(source(model(0)), {"merged": source(model(0))}, backbone, images(4, 3))["merged"].blocks

    (stack,) = backbone.stacks(model(0))
    assert [row.block for row in rows] == [f"{stack}.0", f"{stack}.1"]
    assert [row.distance for row in rows] == [0, 0]
    assert [row.cosine for row in rows] == pytest.approx([1, 1], abs=1e-12)
    assert [row.tokens for row in rows] == [7 * 17] * 2


def test_means_are_over_all_tokens_of_all_batches(tower):
    backbone, model = tower
    expert, merged, batches = model(0), model(1), images(4, 3)

    rows = drift(source(expert), {"merged": source(merged)}, backbone, batches)["merged"].blocks

    ours, theirs = (
        [one(**batch, output_hidden_states=True) for batch in batches] for one in (merged, expert)
    )
    for block, row in enumerate(rows, 1):
        a = torch.cat([output.hidden_states[block].flatten(0, 1) for output in ours]).double()
        b = torch.cat([output.hidden_states[block].flatten(0, 1) for output in theirs]).double()
        assert row.cosine == pytest.approx(torch.cosine_similarity(a, b).mean().item(), abs=1e-9)
        assert row.distance == pytest.approx(((a - b).norm(dim=1) / b.norm(dim=1)).mean().item(), abs=1e-9)


def test_batching_does_not_matter(tower):
    backbone, model = tower
    whole, parts = images(6), [{"pixel_values": part} for part in images(6)[0]["pixel_values"].split(4)]

    one = drift(source(model(0)), {"merged": source(model(1))}, backbone, whole)["merged"].blocks
    other = drift(source(model(0)), {"merged": source(model(1))}, backbone, parts)["merged"].blocks

    assert [row.distance for row in one] == pytest.approx([row.distance for row in other], rel=1e-5)


def test_only_the_first_examples_count(tower):
    backbone, model = tower
    batches = images(4, 4, 4)

    few = drift(source(model(0)), {"merged": source(model(1))}, backbone, batches, examples=5)["merged"]
    cut = [batches[0], {"pixel_values": batches[1]["pixel_values"][:1]}]

    assert few == drift(source(model(0)), {"merged": source(model(1))}, backbone, cut)["merged"]


def test_drift_begins_where_the_weights_differ(tower):
    backbone, model = tower
    expert = model(0)
    merged = copy.deepcopy(expert)
    with torch.no_grad():
        last = merged.get_submodule(f"{backbone.stacks(merged)[0]}.1")
        for parameter in last.parameters():
            parameter.mul_(1.5)

    rows = drift(
        source(expert), {"merged": source(merged), "calibrated": source(expert)}, backbone, images(3)
    )

    assert rows["merged"].blocks[0].distance == 0
    assert rows["merged"].blocks[1].distance > 0.01
    assert rows["calibrated"].blocks[1].distance == 0


def test_padding_does_not_count():
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    config = BertConfig(**sizes, vocab_size=50, architectures=["BertModel"])
    backbone = AnyTransformers(config)
    expert, merged = BertModel(config).eval(), BertModel(config).eval()
    ids = torch.randint(1, 50, (3, 6), generator=torch.Generator().manual_seed(0))
    plain = [{"input_ids": ids, "attention_mask": torch.ones_like(ids)}]
    padded = [{name: torch.nn.functional.pad(value, (0, 5)) for name, value in plain[0].items()}]

    one = drift(source(expert), {"merged": source(merged)}, backbone, plain)["merged"].blocks
    other = drift(source(expert), {"merged": source(merged)}, backbone, padded)["merged"].blocks

    assert [row.tokens for row in other] == [18, 18]
    assert [row.distance for row in other] == pytest.approx([row.distance for row in one], rel=1e-5)
    assert [row.cosine for row in other] == pytest.approx([row.cosine for row in one], abs=1e-6)


def test_a_block_that_never_runs_is_named(tower):
    backbone, model = tower
    stacks = backbone.stacks
    backbone.stacks = lambda model: (*stacks(model), "spare")
    skeleton = backbone.skeleton

    def with_spare():
        outline = skeleton()
        outline.spare = torch.nn.ModuleList([torch.nn.Linear(32, 32, device="meta")])
        return outline

    backbone.skeleton = with_spare
    merged = model(0)
    merged.spare = torch.nn.ModuleList([torch.nn.Linear(32, 32)])

    with pytest.raises(TracingError, match=r'without reaching block "spare\.0"'):
        list(block_features(source(merged), backbone, images(2)))
