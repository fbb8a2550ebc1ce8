"""Classifiers and bare backbones on a base that is a language model: its output head is none of theirs."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file
from torch import Tensor

from merging.errors import CheckpointError, DataError
from merging.pipeline import Pipeline

SIZE = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
TEXT = {**SIZE, "vocab_size": 64, "pad_token_id": 0}
GROUPED = {**TEXT, "num_key_value_heads": 2}
TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2}
KINDS: dict[str, tuple[type[Any], type[Any], type[Any], dict[str, Any], tuple[str, ...]]] = {
    "llama": (
        hf.LlamaForCausalLM,
        hf.LlamaForSequenceClassification,
        hf.LlamaConfig,
        GROUPED,
        ("lm_head.weight",),
    ),
    "gpt2": (
        hf.GPT2LMHeadModel,
        hf.GPT2ForSequenceClassification,
        hf.GPT2Config,
        {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 40, "vocab_size": 64, "pad_token_id": 0},
        (),
    ),
    "bert": (
        hf.BertForMaskedLM,
        hf.BertForSequenceClassification,
        hf.BertConfig,
        TEXT,
        ("cls.predictions.bias", "cls.predictions.transform.dense.weight"),
    ),
    "modernbert": (
        hf.ModernBertForMaskedLM,
        hf.ModernBertForSequenceClassification,
        hf.ModernBertConfig,
        {**TEXT, **TOKENS},
        ("decoder.bias", "head.dense.weight"),  # the classifiers have a head.dense of their own
    ),
}
IDS = torch.randint(3, 64, (40, 9), generator=torch.Generator().manual_seed(3))
LABELS = torch.arange(40) % 3


def moved(model: Any, seed: int) -> Any:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            scale = 0.5 if name.startswith(("score", "classifier")) else 0.005
            tensor += scale * torch.randn(tensor.shape, generator=generator)
    return model.eval()


def base_and(folder: Path, kind: str, *classes: type[Any] | None) -> dict[str, Any]:
    """A spec of a language model and an expert of each class, None for the kind's classifier."""
    of_base, of_experts, of_config, values, _ = KINDS[kind]
    torch.manual_seed(0)
    of_base(of_config(**values)).save_pretrained(folder / "base")
    experts = {}
    for number, made in enumerate(classes):
        labels = {"num_labels": 3 + number} if made is None else {}
        expert = (made or of_experts).from_pretrained(folder / "base", **labels)
        moved(expert, number + 1).save_pretrained(folder / f"e{number}")
        experts[f"e{number}"] = str(folder / f"e{number}")
    return {"base": str(folder / "base"), "experts": experts, "merge": {"type": "average"}, "device": "cpu"}


def scored(folder: Path, spec: dict[str, Any], metrics: Mapping[str, str] | None = None) -> dict[str, Any]:
    """The spec with test examples for every task."""
    given = {"input_ids": IDS, "attention_mask": torch.ones_like(IDS), "labels": LABELS}
    save_file(given, folder / "test.safetensors")
    source = {"type": "tensors", "path": str(folder / "test.safetensors")}
    tasks = {name: {"test": source} for name in spec["experts"]}
    for name, metric in (metrics or {}).items():
        tasks[name] = {"test": {**source}, "metric": metric}  # type: ignore[dict-item]
    return {**spec, "tasks": tasks}


def stored(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize("kind", list(KINDS))
def test_the_backbone_is_merged_and_the_output_head_stays(tmp_path: Path, kind: str) -> None:
    of_base, _, _, _, head = KINDS[kind]
    spec = base_and(tmp_path, kind, None, None)

    told = "\n".join(Pipeline.from_spec(spec).validate())
    merged = Path(Pipeline.from_spec(spec).run(tmp_path / "out").checkpoint)

    found, base = stored(merged), stored(tmp_path / "base")
    experts = [stored(tmp_path / name) for name in spec["experts"]]
    prefix = f"{of_base.base_model_prefix}."
    for name, tensor in found.items():
        if not name.startswith(prefix):
            assert torch.equal(tensor, base[name])
        else:
            mean = sum(one[name].double() for one in experts) / 2
            assert torch.allclose(tensor.double(), mean, atol=1e-6)
    assert set(head) <= {name for name in found if not name.startswith(prefix)}
    assert all(name in told for name in head)
    for name, own in zip(spec["experts"], experts, strict=True):
        kept = load_file(tmp_path / "out" / "heads" / name / "head.safetensors")
        assert all(torch.equal(tensor, own[at]) for at, tensor in kept.items())
        assert any(at.startswith(("score", "classifier")) for at in kept)
    _, about = of_base.from_pretrained(merged, output_loading_info=True)
    assert not any(about[what] for what in ("missing_keys", "unexpected_keys", "mismatched_keys"))


@pytest.mark.parametrize("kind", ["llama", "gpt2", "bert"])
def test_their_heads_score_what_the_backbone_gives(tmp_path: Path, kind: str) -> None:
    spec = scored(tmp_path, base_and(tmp_path, kind, None, None))

    Pipeline.from_spec(spec).run(tmp_path / "out")

    report = json.loads((tmp_path / "out" / "report.json").read_text())["tasks"]
    by_hand = []
    for name in spec["experts"]:
        expert = KINDS[kind][1].from_pretrained(tmp_path / name).eval()
        with torch.no_grad():
            chosen = expert(input_ids=IDS, attention_mask=torch.ones_like(IDS)).logits.argmax(-1)
        by_hand.append(float((chosen == LABELS).float().mean()))
        assert report[name]["scores"]["expert"] == pytest.approx(by_hand[-1])
    assert len({*by_hand, 1 / 3}) > 1


def test_methods_that_run_the_models_leave_the_output_head_too(tmp_path: Path) -> None:
    spec = base_and(tmp_path, "llama", None, None)
    save_file({"input_ids": IDS[:16]}, tmp_path / "data.safetensors")
    source = {"calibration": {"type": "tensors", "path": str(tmp_path / "data.safetensors")}}
    spec |= {"merge": {"type": "regmean"}, "calibrate": {"type": "featcal"}}
    spec["tasks"] = dict.fromkeys(spec["experts"], source)

    found = stored(Path(Pipeline.from_spec(spec).run(tmp_path / "out").checkpoint))

    base = stored(tmp_path / "base")
    assert torch.equal(found["lm_head.weight"], base["lm_head.weight"])
    assert not torch.equal(
        found["model.layers.1.mlp.up_proj.weight"], base["model.layers.1.mlp.up_proj.weight"]
    )


def test_bare_backbones_are_merged_into_a_language_model(tmp_path: Path) -> None:
    spec = base_and(tmp_path, "llama", hf.LlamaModel, hf.LlamaModel)

    found = stored(Path(Pipeline.from_spec(spec).run(tmp_path / "out").checkpoint))

    base, experts = stored(tmp_path / "base"), [stored(tmp_path / name) for name in ("e0", "e1")]
    assert torch.equal(found["lm_head.weight"], base["lm_head.weight"])
    for name, tensor in found.items():
        if name != "lm_head.weight":
            mean = sum(one[name.removeprefix("model.")].double() for one in experts) / 2
            assert torch.allclose(tensor.double(), mean, atol=1e-6)


def test_beside_a_language_model_a_classifier_cannot_be_scored_and_the_answer_says_what_to_do(
    tmp_path: Path,
) -> None:
    spec = base_and(tmp_path, "llama", None, hf.LlamaForCausalLM)
    mixed = scored(tmp_path, spec, {"e1": "perplexity"})

    merged = Path(Pipeline.from_spec(spec).run(tmp_path / "out").checkpoint)
    with pytest.raises(DataError, match="run as a language model here") as caught:
        Pipeline.from_spec(mixed).validate()

    head = "lm_head.weight"
    assert torch.equal(stored(merged)[head], stored(tmp_path / "base")[head])
    assert "merge the classifiers in a run of their own" in str(caught.value)


def test_new_tokens_need_a_row_in_the_output_head_which_classifiers_lack(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    spec = base_and(tmp_path, "llama", None)
    expert = KINDS["llama"][1].from_pretrained(tmp_path / "e0")
    expert.resize_token_embeddings(65, mean_resizing=False)
    expert.save_pretrained(tmp_path / "e0")
    for folder, added in (("base", []), ("e0", ["foo"])):
        words = Tokenizer(models.WordLevel({f"w{at}": at for at in range(64)}, unk_token="w0"))
        words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        words.add_tokens(added)
        hf.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0").save_pretrained(tmp_path / folder)

    with pytest.raises(CheckpointError, match=r"lm_head.weight has none of foo"):
        Pipeline.from_spec({**spec, "vocabulary": "union"}).validate()
    merged = Pipeline.from_spec({**spec, "vocabulary": "base"}).run(tmp_path / "out").checkpoint
    assert stored(Path(merged))["lm_head.weight"].shape == (64, 32)


def test_an_adapter_with_a_classifier_is_scored_by_it(tmp_path: Path) -> None:
    import peft

    spec = base_and(tmp_path, "llama")
    model = KINDS["llama"][1].from_pretrained(tmp_path / "base", num_labels=3)
    torch.manual_seed(1)
    config = peft.LoraConfig(task_type="SEQ_CLS", r=4, target_modules=["q_proj"], init_lora_weights=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what PEFT saves beside the factors
        adapted = peft.get_peft_model(model, config)
        adapted.save_pretrained(tmp_path / "adapter")
    spec["experts"] = {"one": {"adapter": str(tmp_path / "adapter")}}

    Pipeline.from_spec(scored(tmp_path, spec)).run(tmp_path / "out")

    plain = KINDS["llama"][1].from_pretrained(tmp_path / "base", num_labels=3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expert = peft.PeftModel.from_pretrained(plain, tmp_path / "adapter").eval()
    with torch.no_grad():
        chosen = expert(input_ids=IDS).logits.argmax(-1)
    report = json.loads((tmp_path / "out" / "report.json").read_text())["tasks"]["one"]["scores"]
    assert report["expert"] == pytest.approx(float((chosen == LABELS).float().mean()))
