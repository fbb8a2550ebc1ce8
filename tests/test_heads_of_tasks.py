"""Heads of any kind: kept bit for bit beside the merged backbone, and given to a model again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file
from tiny_models import GROUPED
from tiny_texts import sentences, tokenizer, written
from torch import nn

from merging.errors import DataError
from merging.pipeline import Pipeline

SIZE = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
TEXT = {**SIZE, "vocab_size": 64, "max_position_embeddings": 40, "pad_token_id": 1}
SEGFORMER = {
    "num_encoder_blocks": 2,
    "depths": [1, 1],
    "sr_ratios": [2, 1],
    "hidden_sizes": [16, 32],
    "patch_sizes": [7, 3],
    "strides": [4, 2],
    "num_attention_heads": [1, 2],
    "mlp_ratios": [2, 2],
    "decoder_hidden_size": 16,
}
KINDS: dict[str, tuple[type[Any], type[Any], dict[str, Any], tuple[str, ...]]] = {
    "two_layers": (
        hf.RobertaConfig,
        hf.RobertaForSequenceClassification,
        TEXT,
        ("classifier.dense.weight", "classifier.out_proj.weight"),
    ),
    "layer_before": (
        hf.DistilBertConfig,
        hf.DistilBertForSequenceClassification,
        {"dim": 32, "hidden_dim": 64, "n_layers": 2, "n_heads": 4, "vocab_size": 64},
        ("pre_classifier.weight", "classifier.weight"),
    ),
    "convolutions": (
        hf.SegformerConfig,
        hf.SegformerForSemanticSegmentation,
        SEGFORMER,
        ("decode_head.classifier.weight", "decode_head.batch_norm.running_mean"),
    ),
    "linear": (
        hf.ViTConfig,
        hf.ViTForImageClassification,
        {**SIZE, "image_size": 32, "patch_size": 8},
        ("classifier.weight", "classifier.bias"),
    ),
    "of_tokens": (hf.BertConfig, hf.BertForTokenClassification, TEXT, ()),
}


def models(folder: Path, kind: str, *, headless: bool) -> dict[str, Any]:
    """A base, with a head of two classes or none, and experts with heads of three and five."""
    config_class, model_class, values, _ = KINDS[kind]
    torch.manual_seed(0)
    base = model_class(config_class(**values, num_labels=2))
    (base.base_model if headless else base).save_pretrained(folder / "base")
    for seed, classes in enumerate((3, 5), start=1):
        torch.manual_seed(seed)
        labels = {number: f"kind {number}" for number in range(classes)}
        config = config_class(**values, id2label=labels, label2id={name: at for at, name in labels.items()})
        expert = model_class(config)
        state = {
            name: tensor + 0.01 * torch.randn_like(tensor) if tensor.is_floating_point() else tensor
            for name, tensor in base.base_model.state_dict().items()
        }
        expert.base_model.load_state_dict(state)
        expert.save_pretrained(folder / str(classes))
    experts = {"three": str(folder / "3"), "five": str(folder / "5")}
    return {"base": str(folder / "base"), "experts": experts, "merge": {"type": "average"}, "device": "cpu"}


@pytest.mark.parametrize("headless", [True, False])
@pytest.mark.parametrize("kind", list(KINDS))
def test_each_head_is_kept_bit_for_bit_and_can_be_given_to_the_merged_model(
    tmp_path: Path, kind: str, headless: bool
) -> None:
    _, model_class, _, expected = KINDS[kind]
    Pipeline.from_spec(models(tmp_path, kind, headless=headless)).run(tmp_path / "out")

    manifest = json.loads((tmp_path / "out" / "merged" / "manifest.json").read_text())
    for task, classes in (("three", 3), ("five", 5)):
        folder = tmp_path / "out" / "heads" / task
        head, stored = (
            load_file(folder / "head.safetensors"),
            load_file(tmp_path / str(classes) / "model.safetensors"),
        )
        prefix = f"{model_class.base_model_prefix}."
        assert head.keys() == {name for name in stored if not name.startswith(prefix)} >= set(expected)
        assert all(torch.equal(head[name], stored[name]) for name in head)
        assert manifest["notes"]["heads"][task]["own"]["tensors"] == sorted(head)

        config = hf.AutoConfig.from_pretrained(folder)
        assert config.id2label == {number: f"kind {number}" for number in range(classes)}
        state = {**load_file(tmp_path / "out" / "merged" / "model.safetensors"), **head}
        model = model_class.from_pretrained(None, config=config, state_dict=state)
        expert = model_class.from_pretrained(tmp_path / str(classes)).state_dict()
        for name, tensor in model.state_dict().items():
            if not name.startswith(prefix):
                assert torch.equal(tensor, expert[name])
        backbone = hf.AutoModel.from_pretrained(tmp_path / "out" / "merged").state_dict()
        for name, tensor in model.base_model.state_dict().items():
            assert torch.equal(tensor, backbone[name])


def test_a_layer_before_the_classifier_is_not_passed_over_when_scoring(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("merging.data.dense._AFTER_TOKENS", {})  # of a class that is not known
    spec = models(tmp_path, "layer_before", headless=False)
    ids = torch.ones(4, 6, dtype=torch.long)
    save_file({"input_ids": ids, "labels": torch.zeros(4, dtype=torch.long)}, tmp_path / "test.safetensors")
    spec["tasks"] = {"three": {"test": {"type": "tensors", "path": str(tmp_path / "test.safetensors")}}}

    with pytest.raises(DataError, match="classifier does not read the model's features: pre_classifier"):
        Pipeline.from_spec(spec).validate()


def test_a_head_that_nobody_asks_for_need_not_be_linear(tmp_path: Path) -> None:
    spec = models(tmp_path, "two_layers", headless=False)
    ids = torch.randint(2, 60, (8, 6))
    save_file({"input_ids": ids, "attention_mask": torch.ones_like(ids)}, tmp_path / "data.safetensors")
    source = {"calibration": {"type": "tensors", "path": str(tmp_path / "data.safetensors")}}
    spec |= {"merge": {"type": "regmean"}, "tasks": {"three": source, "five": source}}

    Pipeline.from_spec(spec).run(tmp_path / "out")

    assert (tmp_path / "out" / "heads" / "three" / "head.safetensors").is_file()


def test_an_expert_without_the_bases_head_can_be_run(tmp_path: Path) -> None:
    torch.manual_seed(0)
    base = hf.BertForSequenceClassification(hf.BertConfig(**TEXT, num_labels=2))
    base.save_pretrained(tmp_path / "base")
    base.base_model.save_pretrained(tmp_path / "expert")
    ids = torch.randint(2, 60, (8, 6))
    save_file({"input_ids": ids, "attention_mask": torch.ones_like(ids)}, tmp_path / "data.safetensors")
    source = {"calibration": {"type": "tensors", "path": str(tmp_path / "data.safetensors")}}
    spec = {
        "base": str(tmp_path / "base"),
        "experts": {"one": str(tmp_path / "expert")},
        "merge": {"type": "regmean"},
        "tasks": {"one": source},
        "device": "cpu",
    }

    Pipeline.from_spec(spec).run(tmp_path / "out")

    merged = load_file(tmp_path / "out" / "merged" / "model.safetensors")
    assert torch.equal(merged["classifier.weight"], base.state_dict()["classifier.weight"])
    assert isinstance(
        hf.AutoModelForSequenceClassification.from_pretrained(tmp_path / "out" / "merged"), nn.Module
    )


DECODERS: dict[str, tuple[type[Any], type[Any], Any]] = {
    "gpt2": (
        hf.GPT2Model,
        hf.GPT2ForSequenceClassification,
        hf.GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=64, pad_token_id=0, num_labels=3),
    ),
    "mixtral": (
        hf.MixtralModel,
        hf.MixtralForSequenceClassification,
        hf.MixtralConfig(**GROUPED, num_local_experts=4, num_experts_per_tok=2, num_labels=3),
    ),
}


def classifier(folder: Path, base: Any, expert: Any, kind: str, names: dict[int, str] | None = None) -> Any:
    """A base, an expert with a head of its own, and texts with the classes that the expert gives them."""
    base.save_pretrained(folder / "base")
    tokenizer(kind).save_pretrained(folder / "base")
    state = base.base_model.state_dict()
    expert.base_model.load_state_dict(
        {name: one + 0.01 * torch.randn_like(one) for name, one in state.items()}
    )
    expert.eval().save_pretrained(folder / "one")
    rows = sentences(24)
    for row in rows:
        with torch.no_grad():
            found = expert(torch.tensor([tokenizer(kind)(row["text"])["input_ids"]])).logits[0]
        row["number"] = int(found.argmax())
        row["label"] = (names or {}).get(row["number"], str(row["number"]))
    assert len({row["number"] for row in rows}) > 1
    written(folder / "test.jsonl", rows)
    test = {"type": "text", "path": str(folder / "test.jsonl"), "label": "label", "batch_size": 7}
    return {
        "base": str(folder / "base"),
        "experts": {"one": str(folder / "one")},
        "merge": {"type": "average"},
        "tasks": {"one": {"test": test}},
        "device": "cpu",
    }


@pytest.mark.parametrize("headless", [True, False])
@pytest.mark.parametrize("name", list(DECODERS))
def test_a_decoders_head_reads_the_last_token_that_is_no_padding(
    tmp_path: Path, name: str, headless: bool
) -> None:
    backbone_class, model_class, config = DECODERS[name]
    torch.manual_seed(0)
    base = (backbone_class if headless else model_class)(config)
    spec = classifier(tmp_path, base, model_class(config), "causal")

    report = Pipeline.from_spec(spec).run(tmp_path / "out")

    assert report.tasks["one"].scores.expert == 1.0


def bert(**values: Any) -> Any:
    """One whose answers differ between texts."""
    model = hf.BertForSequenceClassification(hf.BertConfig(**TEXT, initializer_range=0.4, **values))
    return model.eval()


def test_a_base_with_a_classifier_of_its_own_is_measured_with_each_experts(tmp_path: Path) -> None:
    torch.manual_seed(0)
    spec = classifier(tmp_path, bert(num_labels=2), bert(num_labels=5), "encoder")

    report = Pipeline.from_spec(spec).run(tmp_path / "out")

    assert report.tasks["one"].scores.expert == 1.0
    made = hf.BertForSequenceClassification.from_pretrained(tmp_path / "out" / "merged")
    assert made.classifier.weight.shape == (2, 32)


def test_classes_named_in_another_order_than_the_heads_are_told(tmp_path: Path) -> None:
    """Names are numbered by the alphabet, a head by the model that it belongs to."""
    names = {0: "positive", 1: "neutral", 2: "negative"}
    labels = {"id2label": names, "label2id": {name: number for number, name in names.items()}}
    torch.manual_seed(0)
    spec = classifier(tmp_path, bert(num_labels=2), bert(**labels), "encoder", names)

    with pytest.raises(DataError) as caught:
        Pipeline.from_spec(spec).validate()
    remedy = caught.value.problems[0].remedy
    assert remedy == 'Number them as the head does: "labels": ["positive", "neutral", "negative"].'
    spec["tasks"]["one"]["test"]["labels"] = list(names.values())
    report = Pipeline.from_spec(spec).run(tmp_path / "out")

    assert report.tasks["one"].scores.expert == 1.0


def test_a_head_for_other_features_of_a_text_is_found_before_any_work(tmp_path: Path) -> None:
    torch.manual_seed(0)
    spec = classifier(tmp_path, bert(num_labels=2), bert(num_labels=5), "encoder")
    save_file({"weight": torch.randn(5, 31)}, tmp_path / "head.safetensors")
    spec["tasks"]["one"]["head"] = {"type": "linear", "path": str(tmp_path / "head.safetensors")}

    with pytest.raises(DataError) as caught:
        Pipeline.from_spec(spec).validate()

    assert "the head reads 31 features, the model gives 32" in caught.value.problems[0].what


def test_experts_for_tokens_that_dropped_the_pooler_merge_into_a_base_that_has_one(tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    config = hf.BertConfig(**sizes, vocab_size=60)
    base = hf.BertModel(config)
    base.save_pretrained(tmp_path / "base")
    classes = {"tokens": hf.BertForTokenClassification, "answers": hf.BertForQuestionAnswering}
    for task, kind in classes.items():
        expert = kind(config)
        expert.bert.load_state_dict(base.state_dict(), strict=False)
        expert.save_pretrained(tmp_path / task)
    spec = {
        "base": str(tmp_path / "base"),
        "experts": {task: str(tmp_path / task) for task in classes},
        "merge": {"type": "average"},
    }

    Pipeline.from_spec(spec).run(tmp_path / "out")

    merged, told = hf.BertModel.from_pretrained(tmp_path / "out" / "merged", output_loading_info=True)
    assert not told["missing_keys"]
    assert not told["unexpected_keys"]
    assert torch.equal(merged.pooler.dense.weight, base.pooler.dense.weight)
    assert (tmp_path / "out" / "heads" / "answers" / "head.safetensors").is_file()
