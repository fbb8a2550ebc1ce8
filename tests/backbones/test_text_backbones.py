"""T5 and the causal language models: whatever the padding, statistics are those of the texts one by one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from tiny_models import GROUPED, SIZE, TEXT
from torch import Tensor, nn

from merging.architecture import select_backbone
from merging.backbones.llama import Llama
from merging.backbones.pretrained import TransformersBackbone
from merging.backbones.t5 import T5
from merging.backbones.transformers import AnyTransformers
from merging.contracts.backbone import Batch
from merging.data.text import padded
from merging.measuring import Measure, TokenWeights, norm_kind
from merging.moments import Moments, NormMoments
from merging.records import Records
from merging.spec.component import AUTO, AutoSettings, Component
from merging.tracer import BlockTracer, blocks_of

T5_SIZE = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "vocab_size": 64}
UNNAMED = {key: value for key, value in GROUPED.items() if key != "head_dim"}
LLAMAS = {
    "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**GROUPED)),
    "llama bare": lambda: hf.LlamaModel(hf.LlamaConfig(**GROUPED)),
    "llama classifier": lambda: hf.LlamaForSequenceClassification(hf.LlamaConfig(**GROUPED, num_labels=3)),
    "mistral": lambda: hf.MistralForCausalLM(hf.MistralConfig(**GROUPED, sliding_window=4)),
    "qwen2": lambda: hf.Qwen2ForCausalLM(hf.Qwen2Config(**GROUPED)),
    "qwen3": lambda: hf.Qwen3ForCausalLM(hf.Qwen3Config(**GROUPED)),
    "gemma": lambda: hf.GemmaForCausalLM(hf.GemmaConfig(**GROUPED)),
    "gemma2": lambda: hf.Gemma2ForCausalLM(hf.Gemma2Config(**GROUPED)),
    "gemma3_text": lambda: hf.Gemma3ForCausalLM(hf.Gemma3TextConfig(**GROUPED)),
    "phi": lambda: hf.PhiForCausalLM(hf.PhiConfig(**UNNAMED)),
    "phi normed": lambda: hf.PhiForCausalLM(hf.PhiConfig(**UNNAMED, qk_layernorm=True)),
    "phi3": lambda: hf.Phi3ForCausalLM(hf.Phi3Config(**UNNAMED)),
    "smollm3": lambda: hf.SmolLM3ForCausalLM(hf.SmolLM3Config(**GROUPED)),
}
T5S = {
    "t5": lambda: hf.T5ForConditionalGeneration(hf.T5Config(**T5_SIZE, decoder_start_token_id=0)),
    "t5 gated": lambda: hf.T5ForConditionalGeneration(
        hf.T5Config(**T5_SIZE, decoder_start_token_id=0, feed_forward_proj="gated-gelu")
    ),
    "mt5": lambda: hf.MT5ForConditionalGeneration(hf.MT5Config(**T5_SIZE, decoder_start_token_id=0)),
    "umt5": lambda: hf.UMT5ForConditionalGeneration(hf.UMT5Config(**T5_SIZE, decoder_start_token_id=0)),
}
TEXTS = [[5, 9, 30, 4, 17, 8], [7, 3], [11, 40, 22, 9]]
SAID = [[0, 9, 12], [0], [0, 33, 7, 5, 6]]


def built(make: Any, backbone: type[TransformersBackbone]) -> tuple[TransformersBackbone, nn.Module]:
    torch.manual_seed(0)
    model = make().eval()
    model.config.architectures = [type(model).__name__]
    model.config.use_cache = "Encoder" not in type(model).__name__
    made = backbone(model.config)
    return made, model.base_model if type(model).__name__.endswith("Classification") else model


def statistics(
    backbone: TransformersBackbone, model: nn.Module, batches: Sequence[Batch]
) -> dict[str, Tensor]:
    """Gram and mean of every feed, and squares of every norm, over all batches."""
    blocks = blocks_of(model, backbone.stacks(model))
    tracer = BlockTracer(model, blocks, [backbone.forward_kwargs(batch) for batch in batches], Records())
    found: dict[str, Tensor] = {}
    for index, block in enumerate(blocks):
        layout = tracer.layout(index, 0)
        moments = {feed: Moments(feed.features) for feed in layout.feeds}
        kinds = {name: norm_kind(block.module.get_submodule(name)) for name in layout.norms}
        norms = {name: NormMoments(kind.features) for name, kind in kinds.items()}
        for number, batch in enumerate(batches):
            weights = TokenWeights(backbone, batch, block, True)
            measure = Measure(block, moments, norms, kinds, weights)
            tracer.record(index, number, tracer.run(index, tracer.call(index, number), measure.observers()))
        for feed, one in moments.items():
            found[f"{block.name}.{feed.linears[0]}"] = one.gram_DD
            found[f"{block.name}.{feed.linears[0]} mean"] = one.mean_D
        found |= {f"{block.name}.{name}": one.square_D for name, one in norms.items()}
    return found


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        error = (found[name] - value).norm() / value.norm().clamp_min(1e-12)
        assert float(error) < 1e-5, f"{name} differs by {float(error):.1e}"


@pytest.mark.parametrize("left", [False, True], ids=["padded after", "padded before"])
@pytest.mark.parametrize("name", LLAMAS)
def test_padding_is_no_data_for_a_causal_model(name: str, left: bool) -> None:
    backbone, model = built(LLAMAS[name], Llama)

    together = statistics(backbone, model, [padded(TEXTS, 0, left=left)])

    assert_same(together, statistics(backbone, model, [padded([text], 0) for text in TEXTS]))


@pytest.mark.parametrize("heads", ["num_attention_heads", "num_key_value_heads"])
@pytest.mark.parametrize("name", ["qwen3", "gemma3_text", "phi normed"])
def test_as_many_heads_as_tokens_are_no_riddle(name: str, heads: str) -> None:
    """Qwen3 norms queries before it moves the heads' axis, Gemma 3 and Phi after."""
    backbone, model = built(LLAMAS[name], Llama)
    length = getattr(model.config, heads)
    texts = [[5, 9, 30, 4][:length], [7]]

    together = statistics(backbone, model, [padded(texts, 0)])

    assert_same(together, statistics(backbone, model, [padded([text], 0) for text in texts]))


LEARNED = {
    "gpt2": lambda: hf.GPT2LMHeadModel(hf.GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=64)),
    "roberta": lambda: hf.RobertaModel(hf.RobertaConfig(**{**SIZE, **TEXT, "pad_token_id": 0})),
}


@pytest.mark.parametrize("left", [False, True], ids=["padded after", "padded before"])
@pytest.mark.parametrize("name", LEARNED)
def test_padding_is_no_data_for_learned_positions(name: str, left: bool) -> None:
    """RoBERTa's first position comes after the padding's id."""
    backbone, model = built(LEARNED[name], AnyTransformers)

    together = statistics(backbone, model, [padded(TEXTS, 0, left=left)])

    assert_same(together, statistics(backbone, model, [padded([text], 0) for text in TEXTS]))


def spoken(texts: Sequence[Sequence[int]], said: Sequence[Sequence[int]]) -> Batch:
    decoder = padded(said, 0)
    return {**padded(texts, 0), **{f"decoder_{name}": value for name, value in decoder.items()}}


@pytest.mark.parametrize("name", T5S)
def test_padding_is_no_data_for_t5_on_either_side(name: str) -> None:
    backbone, model = built(T5S[name], T5)

    together = statistics(backbone, model, [spoken(TEXTS, SAID)])

    alone = [spoken([text], [said]) for text, said in zip(TEXTS, SAID, strict=True)]
    expected = statistics(backbone, model, alone)
    assert_same(together, expected)
    assert "decoder.block.0.layer.1.EncDecAttention.k" in expected  # keys and values have a Gram of their own


def test_labels_weigh_like_a_decoders_mask() -> None:
    backbone, model = built(T5S["t5"], T5)
    labels = torch.tensor([[9, 12, 1, -100], [1, -100, -100, -100], [33, 7, 5, 1]])

    found = statistics(backbone, model, [{**padded(TEXTS, 0), "labels": labels}])

    alone = [
        {**padded([text], 0), "labels": row[row != -100][None]}
        for text, row in zip(TEXTS, labels, strict=True)
    ]
    assert_same(found, statistics(backbone, model, alone))


def test_without_a_decoders_inputs_its_first_token_is_run() -> None:
    backbone, model = built(T5S["t5"], T5)

    kwargs = backbone.forward_kwargs(padded(TEXTS, 0))

    assert kwargs["decoder_input_ids"].tolist() == [[0], [0], [0]]
    assert model(**kwargs).logits.shape == (3, 1, 64)


def test_the_encoder_of_t5_alone() -> None:
    backbone, model = built(lambda: hf.T5EncoderModel(hf.T5Config(**T5_SIZE)), T5)

    together = statistics(backbone, model, [padded(TEXTS, 0)])

    assert_same(together, statistics(backbone, model, [padded([text], 0) for text in TEXTS]))


@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("name", ["llama", "llama classifier"])
def test_features_are_those_of_the_last_token(name: str, left: bool) -> None:
    backbone, model = built(LLAMAS[name], Llama)
    batch = padded(TEXTS, 0, left=left)

    found = backbone.features(model(**backbone.forward_kwargs(batch)), batch)

    for row, text in zip(found, TEXTS, strict=True):
        output = model(torch.tensor([text]))
        alone = output.last_hidden_state if name == "llama classifier" else output.logits
        torch.testing.assert_close(row, alone[0, -1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", [*LLAMAS, *T5S])
def test_auto_knows_them_by_their_model_type(name: str, tmp_path: Path) -> None:
    backbone, _ = built({**LLAMAS, **T5S}[name], Llama if name in LLAMAS else T5)
    backbone.config.save_pretrained(tmp_path)

    found = select_backbone(tmp_path, Component(type=AUTO, settings=AutoSettings()))

    assert found.name == ("llama" if name in LLAMAS else "t5")  # type: ignore[union-attr]
