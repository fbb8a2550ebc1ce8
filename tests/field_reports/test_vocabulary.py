"""Tokenizer and vocabulary: what people report, and what they see here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers as hf
from peft_adapters import adapted, loaded
from safetensors.torch import save_file
from small_models import (
    SIZE,
    WORDS,
    added_up,
    change_config,
    expert,
    llama,
    resized,
    rewritten,
    run,
    saved,
    spec_of,
    tensors_in,
    write_words,
)
from torch import Tensor

import merging
from merging.errors import CheckpointError, SpecError
from merging.pipeline import Pipeline

VOCABULARY = ("model.embed_tokens.weight", "lm_head.weight")


def grown(folder: Path, added: tuple[str, ...] = ("foo", "<sys>"), seed: int = 1) -> Path:
    """An expert with added tokens and a row for each."""
    model = resized(expert(llama(), seed), len(WORDS) + len(added), seed=seed + 10)
    saved(model, folder)
    write_words(folder, WORDS, added)
    return folder


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """base and plain with 64 tokens, more with two added ones."""
    folder = tmp_path_factory.mktemp("models")
    saved(llama(), folder / "base", WORDS)
    saved(expert(llama(), 2), folder / "plain", WORDS)
    grown(folder / "more")
    return folder


def experts(folder: Path) -> dict[str, Path]:
    return {"more": folder / "more", "plain": folder / "plain"}


def cut(tensors: dict[str, Tensor], rows: int) -> dict[str, Tensor]:
    return {name: tensor[:rows] if name in VOCABULARY else tensor for name, tensor in tensors.items()}


def test_a_vocabulary_that_grew_stops_with_the_tokens_and_the_policies(models: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as caught:
        Pipeline.from_spec(spec_of(models / "base", experts(models))).validate()

    text = str(caught.value)
    assert 'expert "more"' in text
    assert '2 of its tokens are not in the base ("foo", "<sys>")' in text
    assert "66 rows, the base's 64" in text
    assert all(f'"{policy}"' in text for policy in ("base", "union", "backbone"))
    assert caught.value.exit_code == 2


def test_the_base_vocabulary_is_kept_and_its_rows_are_merged(models: Path, tmp_path: Path) -> None:
    merged = run(tmp_path / "out", spec_of(models / "base", experts(models), vocabulary="base"))

    folders = [cut(tensors_in(models / name), 64) for name in ("more", "plain")]
    oracle = added_up(tensors_in(models / "base"), folders, 0.3)
    found = tensors_in(merged)
    assert found.keys() == oracle.keys()
    assert all(torch.allclose(found[name].double(), oracle[name], atol=1e-6) for name in oracle)
    assert json.loads((merged / "config.json").read_text())["vocab_size"] == 64
    hf.AutoModelForCausalLM.from_pretrained(merged)


@pytest.mark.parametrize("rule", ["task_arithmetic", "average", "slerp", "iso_c", "ties"])
def test_with_union_new_rows_are_their_experts_own_bit_for_bit(
    models: Path, tmp_path: Path, rule: str
) -> None:
    spec = spec_of(models / "base", experts(models), {"type": rule}, vocabulary="union")

    merged = run(tmp_path / "out", spec)

    found, own = tensors_in(merged), tensors_in(models / "more")
    for name in VOCABULARY:
        assert found[name].shape == (66, 32)
        assert torch.equal(found[name][64:], own[name][64:])
    tokenizer = hf.AutoTokenizer.from_pretrained(merged)
    assert tokenizer.convert_tokens_to_ids(["w3", "foo", "<sys>"]) == [3, 64, 65]
    assert tokenizer("w1 foo <sys> w2")["input_ids"] == [1, 64, 65, 2]
    model, about = hf.AutoModelForCausalLM.from_pretrained(merged, output_loading_info=True)
    assert model.config.vocab_size == 66
    assert not about["missing_keys"]
    assert not about["mismatched_keys"]


def test_rows_follow_the_text_of_tokens_and_never_their_index(models: Path, tmp_path: Path) -> None:
    shuffled = torch.randperm(64, generator=torch.Generator().manual_seed(5))
    saved(expert(llama(), 3), tmp_path / "straight", WORDS)
    other = saved(expert(llama(), 3), tmp_path / "shuffled", [WORDS[at] for at in shuffled])
    tensors = tensors_in(other)
    rewritten(other, {n: t[shuffled] if n in VOCABULARY else t for n, t in tensors.items()})
    spec = spec_of(models / "base", {"one": other})

    with pytest.raises(CheckpointError, match="have another row"):
        Pipeline.from_spec(spec).validate()
    merged = run(tmp_path / "out", {**spec, "vocabulary": "base"})

    expected = run(tmp_path / "expected", spec_of(models / "base", {"one": tmp_path / "straight"}))
    found, wanted = tensors_in(merged), tensors_in(expected)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_two_experts_with_the_same_index_for_other_tokens_do_not_mix(models: Path, tmp_path: Path) -> None:
    grown(tmp_path / "a", ("foo", "both"), seed=3)
    grown(tmp_path / "b", ("bar", "both"), seed=4)
    named = {"a": {"model": str(tmp_path / "a"), "weight": 3.0}, "b": str(tmp_path / "b")}
    spec = spec_of(models / "base", named, {"type": "average"}, vocabulary="union")

    merged = run(tmp_path / "out", spec)

    ids = hf.AutoTokenizer.from_pretrained(merged).convert_tokens_to_ids(["foo", "bar", "both"])
    a, b, found = (tensors_in(one) for one in (tmp_path / "a", tmp_path / "b", merged))
    for name in VOCABULARY:
        assert torch.equal(found[name][ids[0]], a[name][64])
        assert torch.equal(found[name][ids[1]], b[name][64])
        mean = 0.75 * a[name][65].double() + 0.25 * b[name][65].double()
        assert torch.allclose(found[name][ids[2]].double(), mean, atol=1e-7)


def test_with_backbone_embeddings_and_head_stay_the_bases(models: Path, tmp_path: Path) -> None:
    merged = run(tmp_path / "out", spec_of(models / "base", experts(models), vocabulary="backbone"))

    found, base = tensors_in(merged), tensors_in(models / "base")
    assert all(torch.equal(found[name], base[name]) for name in VOCABULARY)
    name = "model.layers.0.mlp.up_proj.weight"
    oracle = added_up(base, [cut(tensors_in(models / one), 64) for one in ("more", "plain")], 0.3)
    assert torch.allclose(found[name].double(), oracle[name], atol=1e-6)


def test_without_tokenizers_rows_are_not_guessed_and_only_the_backbone_can_be_merged(tmp_path: Path) -> None:
    saved(llama(), tmp_path / "base")
    saved(resized(expert(llama(), 1), 66), tmp_path / "more")
    spec = spec_of(tmp_path / "base", {"more": tmp_path / "more"})

    with pytest.raises(
        CheckpointError, match=r"66 rows, the base's 64, and neither has a tokenizer"
    ) as caught:
        Pipeline.from_spec(spec).validate()
    assert '"backbone"' in str(caught.value)
    with pytest.raises(CheckpointError, match='"vocabulary": "base" matches tokens'):
        Pipeline.from_spec({**spec, "vocabulary": "base"}).validate()
    merged = run(tmp_path / "out", {**spec, "vocabulary": "backbone"})
    assert torch.equal(tensors_in(merged)["lm_head.weight"], tensors_in(tmp_path / "base")["lm_head.weight"])


def test_padding_rows_stay_and_new_tokens_take_them(tmp_path: Path) -> None:
    saved(llama(), tmp_path / "base", WORDS[:60])
    saved(expert(llama(), 1), tmp_path / "same", WORDS[:60])
    saved(expert(llama(), 2), tmp_path / "more")
    write_words(tmp_path / "more", WORDS[:60], ("foo",))

    plain = run(tmp_path / "plain", spec_of(tmp_path / "base", {"same": tmp_path / "same"}))
    assert tensors_in(plain)["lm_head.weight"].shape == (64, 32)

    spec = spec_of(tmp_path / "base", {"more": tmp_path / "more"}, {"type": "slerp"}, vocabulary="union")
    spec["experts"]["same"] = str(tmp_path / "same")
    merged = run(tmp_path / "out", spec)
    found, base, more = (tensors_in(one) for one in (merged, tmp_path / "base", tmp_path / "more"))
    for name in VOCABULARY:
        assert found[name].shape == (64, 32)
        assert torch.equal(found[name][60], more[name][60])
        assert torch.equal(found[name][61:], base[name][61:])
    assert hf.AutoTokenizer.from_pretrained(merged).convert_tokens_to_ids("foo") == 60


def test_a_tokenizer_with_more_tokens_than_rows_is_an_error_that_names_both(tmp_path: Path) -> None:
    saved(llama(), tmp_path / "base", [f"w{number}" for number in range(70)])
    saved(expert(llama(), 1), tmp_path / "one")

    with pytest.raises(CheckpointError, match=r"ids need 70 rows, its embedding has 64"):
        Pipeline.from_spec(spec_of(tmp_path / "base", {"one": tmp_path / "one"})).validate()


def test_a_tied_model_grows_once(tmp_path: Path) -> None:
    saved(llama(tied=True), tmp_path / "base", WORDS)
    saved(resized(expert(llama(tied=True), 1), 65), tmp_path / "more")
    write_words(tmp_path / "more", WORDS, ("foo",))

    merged = run(
        tmp_path / "out", spec_of(tmp_path / "base", {"more": tmp_path / "more"}, vocabulary="union")
    )

    found = tensors_in(merged)
    assert "lm_head.weight" not in found
    assert found["model.embed_tokens.weight"].shape == (65, 32)
    hf.AutoModelForCausalLM.from_pretrained(merged)


@pytest.mark.parametrize("policy", ["base", "union", "backbone"])
def test_methods_that_run_models_work_under_every_policy(models: Path, tmp_path: Path, policy: str) -> None:
    last = 65 if policy == "union" else 63
    ids = torch.randint(0, 60, (8, 6), generator=torch.Generator().manual_seed(0))
    ids[:, 2] = last
    save_file({"input_ids": ids, "attention_mask": torch.ones_like(ids)}, tmp_path / "data.safetensors")
    source = {"calibration": {"type": "tensors", "path": str(tmp_path / "data.safetensors")}}
    spec = spec_of(
        models / "base",
        experts(models),
        {"type": "regmean"},
        vocabulary=policy,
        calibrate={"type": "featcal"},
        tasks={"more": source, "plain": source},
    )

    result = run(tmp_path / "out", spec)

    found, own, base = (tensors_in(one) for one in (result, models / "more", models / "base"))
    assert found["lm_head.weight"].shape[0] == (66 if policy == "union" else 64)
    if policy == "union":
        assert all(torch.equal(found[name][64:], own[name][64:]) for name in VOCABULARY)
    if policy == "backbone":
        assert all(torch.equal(found[name], base[name]) for name in VOCABULARY)
    model = hf.AutoModelForCausalLM.from_pretrained(result)
    assert torch.isfinite(model(ids).logits).all()


def test_an_expert_whose_tokens_are_not_known_is_not_run(models: Path, tmp_path: Path) -> None:
    saved(resized(expert(llama(), 1), 66), tmp_path / "more")
    ids = torch.ones(4, 6, dtype=torch.long)
    save_file({"input_ids": ids}, tmp_path / "data.safetensors")
    source = {"calibration": {"type": "tensors", "path": str(tmp_path / "data.safetensors")}}
    spec = spec_of(
        models / "base",
        {"more": tmp_path / "more"},
        {"type": "regmean"},
        vocabulary="backbone",
        tasks={"more": source},
    )

    with pytest.raises(CheckpointError, match="a method that runs this expert needs its rows"):
        Pipeline.from_spec(spec).validate()


def grown_adapter(folder: Path, **config: object) -> dict[str, Tensor]:
    """An adapter on a model with two more tokens, and what PEFT merges it to."""
    model = resized(llama(), 66)
    model.config.vocab_size = 66
    folded = adapted(model, folder, **config)
    write_words(folder, WORDS, ("foo", "<sys>"))
    return folded


def test_an_adapter_that_saved_its_grown_layers_is_matched_by_text(models: Path, tmp_path: Path) -> None:
    saves = ["embed_tokens", "lm_head"]
    folded = grown_adapter(tmp_path / "one", modules_to_save=saves, target_modules=["q_proj"])
    spec = spec_of(models / "base", {"one": {"adapter": str(tmp_path / "one")}}, {"type": "average"})

    with pytest.raises(CheckpointError, match="2 of its tokens are not in the base"):
        Pipeline.from_spec(spec).validate()
    for policy, rows in (("base", 64), ("union", 66)):
        found = tensors_in(run(tmp_path / policy, {**spec, "vocabulary": policy}))
        for name in (*VOCABULARY, "model.layers.0.self_attn.q_proj.weight"):
            assert found[name].shape[0] == (rows if name in VOCABULARY else 32)
            assert torch.allclose(found[name], folded[name][: len(found[name])], atol=1e-6)


def test_factors_on_a_grown_embedding_are_read_and_a_head_without_the_rows_is_named(
    models: Path, tmp_path: Path
) -> None:
    folded = grown_adapter(tmp_path / "one", target_modules=["q_proj", "embed_tokens"])
    spec = spec_of(models / "base", {"one": {"adapter": str(tmp_path / "one")}}, {"type": "average"})
    spec["allow"] = ["other_base"]  # the factors are large

    found = tensors_in(run(tmp_path / "out", {**spec, "vocabulary": "base"}))
    assert torch.allclose(found[VOCABULARY[0]], folded[VOCABULARY[0]][:64], atol=1e-6)
    with pytest.raises(CheckpointError, match=r"lm_head.weight has none of foo, <sys>"):
        Pipeline.from_spec({**spec, "vocabulary": "union"}).validate()


def test_an_adapter_as_result_holds_no_new_tokens_and_says_so(models: Path) -> None:
    spec = spec_of(
        models / "base", experts(models), vocabulary="union", output={"form": "lora", "path": "out"}
    )

    with pytest.raises(SpecError, match="adds rows, which an adapter on the base cannot hold"):
        Pipeline.from_spec(spec)


def test_an_adapter_as_result_of_a_grown_expert_keeps_the_bases_rows(models: Path, tmp_path: Path) -> None:
    spec = spec_of(models / "base", {"more": models / "more"}, {"type": "average"}, vocabulary="base")
    spec["output"] = {"form": "lora", "rank": 8}

    result = run(tmp_path / "out", spec)

    folded = loaded(hf.AutoModelForCausalLM.from_pretrained(models / "base"), result)
    own = tensors_in(models / "more")
    assert folded["model.embed_tokens.weight"].shape == (64, 32)
    assert torch.allclose(
        folded["model.embed_tokens.weight"], own["model.embed_tokens.weight"][:64], atol=1e-6
    )
    manifest = json.loads((result / "manifest.json").read_text())
    assert 0 < manifest["notes"]["adapter"]["relative_error"] < 1


def test_a_base_whose_config_and_rows_disagree_is_refused_before_results_that_do_not_load(
    tmp_path: Path,
) -> None:
    saved(llama(), tmp_path / "base")
    saved(expert(llama(), 1), tmp_path / "one")
    for name in ("base", "one"):
        change_config(tmp_path / name, vocab_size=66)

    with pytest.raises(CheckpointError, match=r"embed_tokens.weight is 64 x 32, by the config 66 x 32"):
        Pipeline.from_spec(spec_of(tmp_path / "base", {"one": tmp_path / "one"})).validate()


def test_side_files_come_along_and_unknown_ones_are_listed(models: Path, tmp_path: Path) -> None:
    base = saved(llama(), tmp_path / "base", WORDS)
    known = {
        "generation_config.json": '{"max_new_tokens": 7}',
        "chat_template.jinja": "{{ messages }}",
        "preprocessor_config.json": '{"image_processor_type": "CLIPImageProcessor"}',
        "special_tokens_map.json": '{"unk_token": "w0"}',
        "1_Pooling/config.json": '{"pooling_mode_mean_tokens": true}',
    }
    for name, text in {**known, "foo.json": "{}"}.items():
        (base / name).parent.mkdir(exist_ok=True)
        (base / name).write_text(text)

    merged = run(tmp_path / "out", spec_of(base, {"plain": models / "plain"}))

    assert all((merged / name).read_text() == text for name, text in known.items())
    notes = json.loads((merged / "manifest.json").read_text())["notes"]
    assert {*known, "tokenizer.json", "config.json"} <= set(notes["side_files"])
    assert notes["not_copied"] == ["foo.json"]
    assert hf.AutoTokenizer.from_pretrained(merged)("w3 w1")["input_ids"] == [3, 1]
    assert hf.AutoImageProcessor.from_pretrained(merged) is not None


def test_tokens_of_an_expert_that_the_base_lacks_are_counted_where_they_are_dropped(models: Path) -> None:
    spec = spec_of(models / "base", experts(models), vocabulary="base")

    told = "\n".join(Pipeline.from_spec(spec).validate())

    assert '2 of its tokens are not in the base ("foo", "<sys>")' in told
    assert "its own tokens are dropped" in told


def test_text_is_read_with_the_tokens_that_the_result_has(models: Path, tmp_path: Path) -> None:
    opened = Pipeline.from_spec(spec_of(models / "base", experts(models), vocabulary="union")).resolve()

    assert hf.AutoTokenizer.from_pretrained(opened.side_files)("w1 foo")["input_ids"] == [1, 64]


def test_an_expert_without_some_tokens_leaves_their_rows_to_the_others(models: Path, tmp_path: Path) -> None:
    fewer = saved(expert(llama(), 4), tmp_path / "fewer")
    rewritten(fewer, cut(tensors_in(fewer), 50))
    change_config(fewer, vocab_size=50)
    write_words(fewer, WORDS[:50])
    spec = spec_of(models / "base", {"fewer": fewer, "plain": models / "plain"}, vocabulary="base")

    found = tensors_in(run(tmp_path / "out", spec))

    base, plain = tensors_in(models / "base"), tensors_in(models / "plain")
    for name in VOCABULARY:
        wanted = base[name][50:].double() + 0.3 * (plain[name][50:].double() - base[name][50:].double())
        assert torch.allclose(found[name][50:].double(), wanted, atol=1e-6)


def test_a_merge_of_folders_in_python_refuses_other_tokens(models: Path) -> None:
    with pytest.raises(CheckpointError, match="2 of its tokens are not in the base"):
        merging.merge("average", models / "base", {"more": models / "more"})


SHORT = {"vocab_size": 64, "max_position_embeddings": 40, "pad_token_id": 1}
BART = {f"{side}_{what}": 2 for side in ("encoder", "decoder") for what in ("layers", "attention_heads")}
GROWING = {
    "bert": lambda: hf.BertForMaskedLM(hf.BertConfig(**SIZE, **SHORT)),
    "roberta": lambda: hf.RobertaForMaskedLM(hf.RobertaConfig(**SIZE, **SHORT)),
    "gpt2": lambda: hf.GPT2LMHeadModel(hf.GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=64)),
    "bart": lambda: hf.BartForConditionalGeneration(
        hf.BartConfig(d_model=32, encoder_ffn_dim=64, decoder_ffn_dim=64, **BART, **SHORT)
    ),
    "t5": lambda: hf.T5ForConditionalGeneration(
        hf.T5Config(d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, vocab_size=64)
    ),
}


@pytest.mark.parametrize("kind", list(GROWING))
def test_every_tensor_with_a_row_per_token_follows(tmp_path: Path, kind: str) -> None:
    torch.manual_seed(0)
    base = GROWING[kind]().eval()
    saved(base, tmp_path / "base", WORDS)
    model = resized(expert(base, 1), 66)
    saved(model, tmp_path / "more")
    write_words(tmp_path / "more", [*WORDS[32:], *WORDS[:32]], ("foo", "<sys>"))
    order = torch.cat([torch.arange(32, 64), torch.arange(32), torch.tensor([64, 65])])

    merged = run(
        tmp_path / "out",
        spec_of(tmp_path / "base", {"more": tmp_path / "more"}, {"type": "average"}, vocabulary="union"),
    )

    result = type(base).from_pretrained(merged).eval()
    theirs = torch.randint(2, 66, (2, 6), generator=torch.Generator().manual_seed(1))
    more = {"decoder_input_ids": order[theirs]} if result.config.is_encoder_decoder else {}
    start = {"decoder_input_ids": theirs} if more else {}
    ours = order[theirs]
    found = result(input_ids=ours, attention_mask=torch.ones_like(ours), **more).logits
    wanted = model(input_ids=theirs, attention_mask=torch.ones_like(ours), **start).logits
    assert torch.allclose(found, wanted[..., order], atol=1e-5)
