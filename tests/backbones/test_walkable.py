"""What cannot be walked is refused by name or left alone and listed, never measured wrongly."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from safetensors.torch import save_file
from tiny_models import BART, GROUPED, SIZE, TEXT, Given, expert_of, opened
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from merging.backbones.padding import changed_by_padding
from merging.backbones.transformers import AnyTransformers
from merging.calibrators.featcal import FeatCal
from merging.checkpoints.sink import StateDictSink
from merging.checkpoints.source import StateDictSource
from merging.contracts.backbone import Backbone
from merging.contracts.models import Models
from merging.data.task import CalibrationData
from merging.errors import CheckpointError, DataError, TracingError
from merging.evaluation.drift import drift
from merging.fates import FIXED, SEVERAL, foreseen
from merging.pipeline import Pipeline
from merging.records import Records
from merging.strategies.regmean import RegMean
from merging.streaming import StreamedModel, load_model
from merging.tracer import BlockTracer, blocks_of
from merging.walkable import look, refuse_unwalkable_stacks

Make = Callable[[], nn.Module]
WORDS = [[5, 9, 30, 4, 17, 8, 11], [7, 3], [11, 40, 22, 9]]
POSITIONS = {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "max_relative_positions": 8}
SPEECH = {
    "conv_dim": (16, 16),
    "conv_stride": (5, 2),
    "conv_kernel": (10, 3),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
}


def of(model: str, config: str, **settings: Any) -> Make:
    return lambda: getattr(hf, model)(getattr(hf, config)(**settings))


ALBERT = of("AlbertModel", "AlbertConfig", **SIZE, vocab_size=64, embedding_size=16)
DEBERTA_V3 = of(
    "DebertaV2Model",
    "DebertaV2Config",
    **SIZE,
    **POSITIONS,
    vocab_size=64,
    position_buckets=8,
    share_att_key=True,
    norm_rel_ebd="layer_norm",
)
DEBERTA = of("DebertaModel", "DebertaConfig", **SIZE, **POSITIONS, vocab_size=64)
BART_MODEL = of("BartModel", "BartConfig", d_model=32, **BART, **TEXT)
MARIAN = of("MarianMTModel", "MarianConfig", d_model=32, **BART, **TEXT, max_position_embeddings=40)
T5 = of("T5EncoderModel", "T5Config", d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, vocab_size=64)


def made(make: Make) -> tuple[AnyTransformers, nn.Module]:
    torch.manual_seed(0)
    model: Any = make().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape))
    model.config.architectures = [type(model).__name__]
    return AnyTransformers(model.config), model


def merged_of(make: Make) -> Models:
    backbone, base = made(make)
    return opened(base, {"a": expert_of(base, 1), "b": expert_of(base, 2)}, backbone)


def padded(rows: list[list[int]], *, before: bool = False) -> dict[str, Tensor]:
    longest = max(map(len, rows))
    ids = torch.zeros(len(rows), longest, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for place, row in enumerate(rows):
        start = longest - len(row) if before else 0
        ids[place, start : start + len(row)] = torch.tensor(row)
        mask[place, start : start + len(row)] = 1
    return {"input_ids": ids, "attention_mask": mask}


def result(
    models: Models, rule: Any, *batches: dict[str, Tensor]
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors, and why those that are not solved are left."""
    data = CalibrationData({task: Given(*batches) for task in models.tasks})
    rule.precision = "float64"
    sink = StateDictSink(models.base)
    with sink:
        if isinstance(rule, RegMean):
            notes = rule.merge(models, data, sink)
        else:
            notes = rule.calibrate(models.experts["a"], models, data, sink)
    return sink.tensors, dict(notes["left"])


def test_a_block_that_runs_once_for_each_layer_is_refused_by_name() -> None:
    models = merged_of(ALBERT)

    with pytest.raises(TracingError, match=r'albert_layer_groups\.0" runs 3 times in one forward'):
        result(models, RegMean(), padded(WORDS))


def test_its_drift_is_that_of_the_whole_model_and_not_of_one_run_of_its_block() -> None:
    models = merged_of(ALBERT)
    backbone = models.backbone
    assert backbone is not None
    batch = padded(WORDS)

    found = drift(models.experts["a"], {"merged": models.experts["b"]}, backbone, [batch])["merged"]

    features = [
        backbone.features(load_model(backbone, models.experts[task])(**batch), batch) for task in ("b", "a")
    ]
    expected = torch.cosine_similarity(*features, dim=-1)
    assert not found.blocks
    assert found.output is not None
    assert torch.allclose(torch.tensor(found.output.cosines), expected, atol=1e-5)


@pytest.mark.parametrize("rule", [RegMean, FeatCal])
def test_linears_that_run_twice_in_a_block_are_left_alone_and_listed(rule: Any) -> None:
    models = merged_of(DEBERTA_V3)

    together, left = result(models, rule(), padded(WORDS))
    alone, _ = result(models, rule(), *(padded([row]) for row in WORDS))

    block = "encoder.layer.0.attention.self."
    for name in ("query_proj.weight", "key_proj.weight"):
        assert left[f"{block}{name}"] == SEVERAL
    assert f"{block}value_proj.weight" not in left
    assert max(float((together[name] - alone[name]).abs().max()) for name in together) < 1e-6


def test_what_is_fed_with_positions_alone_is_left_alone_and_listed() -> None:
    models = merged_of(DEBERTA)

    together, left = result(models, RegMean(), padded(WORDS))
    alone, _ = result(models, RegMean(), *(padded([row]) for row in WORDS))

    assert left["encoder.layer.0.attention.self.pos_proj.weight"] == FIXED
    assert "encoder.layer.0.attention.self.in_proj.weight" not in left
    assert max(float((together[name] - alone[name]).abs().max()) for name in together) < 1e-6


@pytest.mark.parametrize("make", [DEBERTA, DEBERTA_V3])
def test_the_plan_foresees_what_the_sweep_leaves(make: Make) -> None:
    models = merged_of(make)
    assert models.backbone is not None

    _, left = result(models, RegMean(), padded(WORDS))
    _, seen = foreseen(RegMean(), models, models.backbone.skeleton())

    assert left == seen


class Small(Backbone):
    """Three linears in a list, run by a function."""

    def __init__(self, forward: Callable[[nn.ModuleList, Tensor], Tensor]) -> None:
        super().__init__(None)
        self._forward = forward

    def skeleton(self) -> nn.Module:
        run = self._forward

        class Model(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4, device="meta")) for _ in range(3))

            def forward(self, x: Tensor) -> Tensor:
                return run(self.blocks, x)

        return Model().eval()

    def stacks(self, model: nn.Module) -> tuple[str, ...]:
        return ("blocks",)

    def features(self, output: Any, batch: Any) -> Tensor:
        raise NotImplementedError

    def example(self) -> dict[str, Tensor]:
        return {"x": torch.ones(1, 2, 4)}


def in_turn(blocks: Any, x: Tensor) -> Tensor:
    for block in blocks:
        x = block(x)
    return x


@pytest.mark.parametrize(
    ("forward", "why"),
    [
        (in_turn, ""),
        (lambda blocks, x: in_turn([*blocks, blocks[1]], x), r'"blocks\.1" runs 2 times'),
        (lambda blocks, x: in_turn(reversed(list(blocks)), x), "do not run in order"),
        (
            lambda blocks, x: blocks[2](blocks[1](y := blocks[0](x)) + y),
            r'"blocks\.2" is handed what an earlier block answers',
        ),
        (lambda blocks, x: in_turn(blocks, x[:, torch.randperm(2)] + torch.rand(())), "draws at random"),
    ],
)
def test_any_backbones_stack_must_run_in_turn(forward: Any, why: str) -> None:
    backbone = Small(forward)

    if not why:
        refuse_unwalkable_stacks(backbone, ["blocks"], backbone.example())
        return
    with pytest.raises(TracingError, match=why):
        refuse_unwalkable_stacks(backbone, ["blocks"], backbone.example())


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (
            of(
                "LongformerModel",
                "LongformerConfig",
                **SIZE,
                vocab_size=64,
                attention_window=4,
                max_position_embeddings=40,
            ),
            "sees padding that the model itself puts after a text",
        ),
        (
            of(
                "Gemma3nForCausalLM",
                "Gemma3nTextConfig",
                **{**GROUPED, "num_hidden_layers": 4},
                vocab_size_per_layer_input=64,
                hidden_size_per_layer_input=8,
                num_kv_shared_layers=2,
                laurel_rank=4,
                activation_sparsity_pattern=[0.0] * 4,
                layer_types=["sliding_attention", "full_attention"] * 2,
            ),
            "leaves something for later blocks",
        ),
        (
            of("ViTMAEModel", "ViTMAEConfig", **SIZE, image_size=32, patch_size=8),
            "draws at random",
        ),
        (
            of("XLMModel", "XLMConfig", emb_dim=32, n_layers=2, n_heads=4, max_position_embeddings=40),
            "runs between its blocks",
        ),
    ],
    ids=["longformer", "gemma3n", "vit_mae", "xlm"],
)
def test_a_model_that_is_not_walked_as_it_runs_is_refused_with_the_reason(make: Make, why: str) -> None:
    backbone, model = made(make)

    with pytest.raises(TracingError, match=why):
        backbone.stacks(model)


OTHERS: dict[str, Make] = {
    "distilbert": of(
        "DistilBertModel", "DistilBertConfig", dim=32, hidden_dim=64, n_layers=2, n_heads=4, vocab_size=64
    ),
    "electra": of("ElectraModel", "ElectraConfig", **SIZE, vocab_size=64, embedding_size=16),
    "mpnet": of("MPNetModel", "MPNetConfig", **SIZE, vocab_size=64),
    "modernbert": of(
        "ModernBertModel",
        "ModernBertConfig",
        **SIZE,
        **TEXT,
        cls_token_id=1,
        sep_token_id=2,
        local_attention=4,
    ),
    "deberta_v3": DEBERTA_V3,
    "deberta": DEBERTA,
    "funnel": of(
        "FunnelModel",
        "FunnelConfig",
        vocab_size=64,
        block_sizes=[1, 1],
        d_model=32,
        n_head=4,
        d_head=8,
        d_inner=64,
        num_decoder_layers=1,
    ),
    "falcon": of(
        "FalconForCausalLM",
        "FalconConfig",
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        vocab_size=64,
    ),
    "bloom": of("BloomForCausalLM", "BloomConfig", hidden_size=32, n_layer=2, n_head=4, vocab_size=64),
    "neox": of("GPTNeoXForCausalLM", "GPTNeoXConfig", **SIZE, vocab_size=64),
    "marian": MARIAN,
    "swin": of(
        "SwinModel",
        "SwinConfig",
        image_size=32,
        patch_size=4,
        embed_dim=16,
        depths=[1, 2],
        num_heads=[2, 2],
        window_size=4,
    ),
    "beit": of("BeitModel", "BeitConfig", **SIZE, image_size=32, patch_size=8),
    "siglip": of("SiglipVisionModel", "SiglipVisionConfig", **SIZE, image_size=32, patch_size=8),
    "convnext": of(
        "ConvNextModel",
        "ConvNextConfig",
        image_size=32,
        hidden_sizes=[8, 16],
        depths=[1, 2],
        num_stages=2,
        patch_size=4,
    ),
    "wav2vec2": of("Wav2Vec2Model", "Wav2Vec2Config", **SIZE, **SPEECH, vocab_size=32),
}


@pytest.mark.parametrize("name", OTHERS)
def test_walked_block_by_block_other_architectures_answer_as_they_do_by_themselves(name: str) -> None:
    backbone, model = made(OTHERS[name])
    batch = dict(backbone.example())
    if "input_ids" in batch:
        batch |= padded(WORDS[:1])
    elif "pixel_values" in batch:
        batch["pixel_values"] = torch.randn(batch["pixel_values"].shape)
    else:
        batch["input_values"] = torch.randn(1, 400)
    call = backbone.forward_kwargs(batch)
    source = StateDictSource(model)
    streamed = StreamedModel(backbone, source.names())
    streamed.attach(source)
    blocks = blocks_of(streamed.module, backbone.stacks(streamed.module))
    streamed.load(without=[block.name for block in blocks])
    tracer = BlockTracer(streamed.module, blocks, [call], Records())

    for index, block in enumerate(blocks):
        streamed.load(block.name)
        tracer.record(index, 0, tracer.run(index, tracer.call(index, 0), {}))
        streamed.release(block.name)

    with torch.no_grad():
        expected, found = (
            [leaf for leaf in pytree.tree_leaves(dict(output)) if isinstance(leaf, Tensor)]
            for output in (model(**call), tracer.finish(0))
        )
    assert len(blocks) > 1
    assert len(found) == len(expected) > 0
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize(
    ("make", "before", "after"),
    [
        (BART_MODEL, True, False),
        (MARIAN, True, False),
        (T5, False, False),
        (DEBERTA_V3, False, False),
        (of("BertModel", "BertConfig", **SIZE, vocab_size=64), False, False),
        (of("GPT2Model", "GPT2Config", n_embd=32, n_layer=2, n_head=4, **TEXT), False, False),
        (of("LlamaForCausalLM", "LlamaConfig", **GROUPED), False, False),
        (of("PegasusModel", "PegasusConfig", d_model=32, **BART, **TEXT), True, False),
        (of("ConvBertModel", "ConvBertConfig", **SIZE, vocab_size=64, embedding_size=32), True, True),
        (of("MobileBertModel", "MobileBertConfig", **SIZE, vocab_size=64, embedding_size=32), True, True),
    ],
    ids=["bart", "marian", "t5", "deberta_v3", "bert", "gpt2", "llama", "pegasus", "convbert", "mobilebert"],
)
def test_whether_padding_changes_a_text_is_found_without_weights(
    make: Make, before: bool, after: bool
) -> None:
    backbone, _ = made(make)

    assert changed_by_padding(backbone, "attention_mask", after=False) is before
    assert changed_by_padding(backbone, "attention_mask", after=True) is after


def test_texts_that_padding_moves_are_refused_and_those_padded_at_their_end_are_not() -> None:
    models = merged_of(BART_MODEL)
    answer = {"decoder_input_ids": torch.full((3, 2), 5)}

    with pytest.raises(DataError, match=r"padded at their beginning \(attention_mask\).*moves the text"):
        result(models, RegMean(), {**padded(WORDS, before=True), **answer})
    late = {"decoder_attention_mask": torch.tensor([[0, 1], [1, 1], [1, 1]])}
    with pytest.raises(DataError, match="decoder_attention_mask"):
        result(models, RegMean(), {**padded(WORDS), **answer, **late})
    together, _ = result(models, RegMean(), {**padded(WORDS), **answer})

    one = {"decoder_input_ids": torch.full((1, 2), 5)}
    alone, _ = result(models, RegMean(), *({**padded([row]), **one} for row in WORDS))
    assert max(float((together[name] - alone[name]).abs().max()) for name in together) < 1e-6


def test_positions_that_are_not_stored_are_computed() -> None:
    backbone, _ = made(MARIAN)
    model: Any = MARIAN().eval()
    unstored = {f"model.{side}.embed_positions.weight" for side in ("encoder", "decoder")}
    stored = {name: tensor for name, tensor in model.state_dict().items() if name not in unstored}
    call = {**padded(WORDS), "decoder_input_ids": torch.full((3, 2), 5)}

    loaded = load_model(backbone, StateDictSource(stored))

    with torch.no_grad():
        assert torch.equal(loaded(**call).logits, model(**call).logits)


def test_a_weight_that_is_drawn_at_random_is_still_missed() -> None:
    backbone, model = made(MARIAN)
    stored = dict(model.state_dict())
    del stored["model.encoder.layers.0.fc1.weight"]

    with pytest.raises(CheckpointError, match=r"1 of .* parameters"):
        load_model(backbone, StateDictSource(stored))


def test_a_look_costs_one_block_of_each_kind() -> None:
    ran: list[int] = []

    def forward(blocks: Any, x: Tensor) -> Tensor:
        for place, block in enumerate(blocks):
            block[0].register_forward_pre_hook(lambda *_, place=place: ran.append(place))
        return in_turn(blocks, x)

    look(Small(forward), ["blocks"])

    assert set(ran) == {0}


def test_a_pooler_without_weights_is_not_missed(tmp_path: Path) -> None:
    _, model = made(OTHERS["swin"])
    model.save_pretrained(tmp_path)
    backbone = AnyTransformers(model.config, folder=tmp_path)
    batch = {"pixel_values": torch.randn(2, 3, 32, 32)}

    loaded = load_model(backbone, StateDictSource(model))

    with torch.no_grad():
        assert torch.equal(backbone.features(loaded(**batch), batch), model(**batch).pooler_output)
    assert not backbone.remarks()


def test_what_cannot_be_walked_is_refused_before_the_run_and_merged_by_other_rules(tmp_path: Path) -> None:
    _, base = made(ALBERT)
    base.save_pretrained(tmp_path / "base")
    for seed in (1, 2):
        expert = ALBERT()
        expert.load_state_dict(expert_of(base, seed))
        expert.save_pretrained(tmp_path / str(seed))
        save_file(padded(WORDS), tmp_path / f"{seed}.safetensors")
    spec: dict[str, Any] = {
        "base": str(tmp_path / "base"),
        "experts": {str(seed): str(tmp_path / str(seed)) for seed in (1, 2)},
        "tasks": {
            str(seed): {"calibration": {"type": "tensors", "path": str(tmp_path / f"{seed}.safetensors")}}
            for seed in (1, 2)
        },
    }

    with pytest.raises(CheckpointError, match=r"cannot walk the model.*runs 3 times in one forward"):
        Pipeline.from_spec({**spec, "merge": {"type": "regmean"}}).validate()
    pipeline = Pipeline.from_spec({**spec, "merge": {"type": "task_arithmetic"}})
    assert pipeline.plan()
    report = pipeline.run(str(tmp_path / "out"))

    assert {one.state for one in report.parameters.values()} == {"merged"}
