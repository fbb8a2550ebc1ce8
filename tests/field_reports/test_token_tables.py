"""Which tensors have a row per token: those that the model class names, and no others that are as tall."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from small_models import SIZE, WORDS, expert, resized, run, saved, spec_of, tensors_in, write_words
from torch import Tensor, nn

from merging.checkpoints.names import module_names
from merging.checkpoints.source import StateDictSource
from merging.checkpoints.vocabulary_rows import vocabulary_axes
from merging.errors import CheckpointError
from merging.pipeline import Pipeline

ROWS = 64
ORDER = [*range(4), *reversed(range(4, 48)), *range(48, ROWS)]  # the expert's row -> the base's, by text
GROUPED = {**SIZE, "num_key_value_heads": 2, "vocab_size": ROWS, "pad_token_id": 0}
LAYERS = {
    **GROUPED,
    "head_dim": 8,
    "layer_types": ["sliding_attention", "full_attention"],
    "num_kv_shared_layers": 0,
    "hidden_size_per_layer_input": 4,
}


def gpt2() -> nn.Module:
    return hf.GPT2LMHeadModel(
        hf.GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=ROWS, vocab_size=ROWS)
    )


def bert() -> nn.Module:
    config = hf.BertConfig(**SIZE, vocab_size=ROWS, type_vocab_size=ROWS, max_position_embeddings=ROWS)
    return hf.BertForMaskedLM(config)


def t5() -> nn.Module:
    config = hf.T5Config(
        d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, vocab_size=ROWS,
        relative_attention_num_buckets=ROWS,
    )  # fmt: skip
    return hf.T5ForConditionalGeneration(config)


def gemma(per_layer: int = ROWS) -> nn.Module:
    """A table of tokens for all layers, and one more for each."""
    config = hf.Gemma3nTextConfig(
        **LAYERS, vocab_size_per_layer_input=per_layer, laurel_rank=4, activation_sparsity_pattern=[0.0, 0.0]
    )
    return hf.Gemma3nForCausalLM(config)


def mllama() -> nn.Module:
    """Eight rows more in the embedding than in the head."""
    return hf.MllamaForCausalLM(hf.MllamaTextConfig(**GROUPED, cross_attention_layers=[1]))


def clip() -> nn.Module:
    text = {**SIZE, "vocab_size": ROWS, "max_position_embeddings": 40}
    config = hf.CLIPConfig(text_config=text, vision_config={**SIZE, "image_size": 32, "patch_size": 4})
    return hf.CLIPModel(config)  # 65 positions of the picture


TABLES: dict[Callable[[], nn.Module], set[str]] = {
    gpt2: {"transformer.wte.weight"},
    bert: {"bert.embeddings.word_embeddings.weight", "cls.predictions.bias"},
    t5: {"shared.weight"},
    gemma: {"model.embed_tokens.weight", "model.embed_tokens_per_layer.weight"},
    mllama: {"model.embed_tokens.weight", "lm_head.weight"},
    clip: {"text_model.embeddings.token_embedding.weight"},
}


def made(make: Callable[..., nn.Module], **values: int) -> nn.Module:
    torch.manual_seed(0)
    return make(**values).eval()


def axes(folder: Path, model: nn.Module) -> dict[str, int]:
    """Of the tensors that the folder stores."""
    source = StateDictSource(tensors_in(folder), "base")
    return vocabulary_axes(model, module_names(model, source.names()), source)


def reordered(model: nn.Module, names: set[str]) -> dict[str, Tensor]:
    """The model's tables with row n where ORDER[n] was; all else as it is."""
    before = model.state_dict()
    with torch.no_grad():
        for name in names:
            table = before[name]
            order = torch.tensor([at for at in ORDER if at < len(table)])
            table[: len(order)] = table[order].clone()
    return {name: tensor.clone() for name, tensor in before.items()}


def pair(folder: Path, make: Callable[..., nn.Module], **values: int) -> tuple[dict[str, Any], nn.Module]:
    """A spec of a base and an expert whose tokenizer numbers the words otherwise, and the expert with the
    base's numbers."""
    base = made(make, **values)
    plain, other = expert(base, 1), expert(base, 1)
    saved(base, folder / "base", WORDS)
    reordered(other, TABLES[make])
    saved(other, folder / "other", [WORDS[at] for at in ORDER])
    return spec_of(folder / "base", {"one": folder / "other"}, {"type": "average"}, vocabulary="base"), plain


@pytest.mark.parametrize("make", list(TABLES))
def test_the_model_class_says_which_tensors_have_a_row_per_token(
    tmp_path: Path, make: Callable[[], nn.Module]
) -> None:
    model = made(make)
    saved(model, tmp_path)

    assert set(axes(tmp_path, model)) == TABLES[make]


@pytest.mark.parametrize("make", [gpt2, bert, t5, gemma, mllama])
def test_other_tables_as_tall_as_the_vocabulary_keep_their_order(
    tmp_path: Path, make: Callable[[], nn.Module]
) -> None:
    spec, wanted = pair(tmp_path, make)

    found = tensors_in(run(tmp_path / "out", spec))

    state, base = wanted.state_dict(), tensors_in(tmp_path / "base")
    spare = "model.embed_tokens.weight" if make is mllama else None  # whose last rows are of no token
    for name, tensor in found.items():
        rows = ROWS if name == spare else len(tensor)
        assert torch.equal(tensor[:rows], state[name][:rows])
        assert torch.equal(tensor[rows:], base[name][rows:])


def test_a_table_of_the_first_tokens_alone_follows_them(tmp_path: Path) -> None:
    spec, wanted = pair(tmp_path, gemma, per_layer=50)

    found = tensors_in(run(tmp_path / "out", spec))

    assert found["model.embed_tokens_per_layer.weight"].shape[0] == 50
    assert all(torch.equal(tensor, wanted.state_dict()[name]) for name, tensor in found.items())


def grown(folder: Path, base: nn.Module) -> dict[str, Any]:
    saved(base, folder / "base", WORDS)
    saved(resized(expert(base, 1), ROWS + 2), folder / "more")
    write_words(folder / "more", WORDS, ("foo", "<sys>"))
    return spec_of(folder / "base", {"more": folder / "more"}, {"type": "average"}, vocabulary="union")


def test_positions_stay_as_they_are_where_tokens_are_added(tmp_path: Path) -> None:
    merged = run(tmp_path / "out", grown(tmp_path, made(gpt2)))

    found, more = tensors_in(merged), tensors_in(tmp_path / "more")
    assert all(torch.equal(found[name], more[name]) for name in more)
    model = hf.AutoModelForCausalLM.from_pretrained(merged)
    assert (model.config.n_positions, model.config.vocab_size) == (ROWS, ROWS + 2)


def test_a_table_for_each_layer_grows_with_the_vocabulary(tmp_path: Path) -> None:
    merged = run(tmp_path / "out", grown(tmp_path, made(gemma)))

    found, more = tensors_in(merged), tensors_in(tmp_path / "more")
    assert all(torch.equal(found[name], more[name]) for name in more)
    model = hf.AutoModelForCausalLM.from_pretrained(merged)
    assert model.config.vocab_size_per_layer_input == model.config.vocab_size == ROWS + 2


def test_a_table_that_ends_before_the_new_tokens_is_named(tmp_path: Path) -> None:
    spec = grown(tmp_path, made(gemma, per_layer=50))

    with pytest.raises(CheckpointError, match=r"embed_tokens_per_layer.weight ends at 50 of 64"):
        Pipeline.from_spec(spec).validate()


def test_a_head_that_alone_has_other_rows_is_told_with_them(tmp_path: Path) -> None:
    base = made(mllama)
    saved(base, tmp_path / "base", WORDS)
    other = expert(base, 1)
    other.lm_head = nn.Linear(32, ROWS + 2, bias=False)
    saved(other, tmp_path / "other", WORDS)

    with pytest.raises(CheckpointError, match=r"lm_head.weight has 66 rows, the base's 64"):
        Pipeline.from_spec(spec_of(tmp_path / "base", {"one": tmp_path / "other"})).validate()


def test_texts_of_a_whole_clip_follow_their_tokens_though_its_image_tower_is_walked(tmp_path: Path) -> None:
    spec, wanted = pair(tmp_path, clip)

    with pytest.raises(CheckpointError, match="have another row"):
        Pipeline.from_spec({**spec, "vocabulary": None}).validate()
    found = tensors_in(run(tmp_path / "out", spec))

    assert all(torch.equal(tensor, wanted.state_dict()[name]) for name, tensor in found.items())
