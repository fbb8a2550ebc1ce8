"""Models with and without a pooler as base and expert, and heads with a layer of their own."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file
from tiny_models import PICTURE, SIZE, TEXT, expert_of, pixels, tokens
from torch import Tensor, nn

from merging.data.heads import load_head
from merging.errors import DataError
from merging.pipeline import Pipeline

LAYERS = {**SIZE, "num_hidden_layers": 1}
SENTENCES = {**LAYERS, **TEXT, "num_labels": 5, "max_position_embeddings": 40}


def model(made: Any, **config: Any) -> nn.Module:
    torch.manual_seed(0)
    return made(made.config_class(**config)).eval()


def write(folder: Path, base: nn.Module, expert: nn.Module, examples: Mapping[str, Tensor]) -> dict[str, Any]:
    """A spec; the expert's tensors are near the base's wherever they have the same names."""
    shared = {
        name.removeprefix(f"{expert.base_model_prefix}."): one for name, one in expert_of(base, 1).items()
    }
    inner: Any = expert.base_model
    own = {name: one for name, one in shared.items() if name in inner.state_dict()}
    inner.load_state_dict(own, strict=False)
    base.save_pretrained(folder / "base")
    expert.save_pretrained(folder / "expert")
    save_file(dict(examples), folder / "calibration.safetensors")
    with torch.no_grad():
        labels = expert(**examples).logits.argmax(-1) if hasattr(expert, "classifier") else None
    test = {**examples, "labels": torch.zeros(len(next(iter(examples.values()))), dtype=torch.long)}
    save_file(test if labels is None else {**test, "labels": labels}, folder / "test.safetensors")
    task: dict[str, Any] = {
        "calibration": {"type": "tensors", "path": str(folder / "calibration.safetensors")}
    }
    if labels is not None:
        task["test"] = {"type": "tensors", "path": str(folder / "test.safetensors")}
    return {
        "base": str(folder / "base"),
        "experts": {"task": str(folder / "expert")},
        "merge": {"type": "regmean"},
        "allow": ["overlap", "far_from_base", "few_examples"],
        "tasks": {"task": task},
        "device": "cpu",
        "output": {"path": str(folder / "out")},
    }


def bare(made: Any, **config: Any) -> nn.Module:
    """Without its pooler."""
    torch.manual_seed(0)
    return made(made.config_class(**config), add_pooling_layer=False).eval()


def right(seed: int = 3) -> dict[str, Tensor]:
    return tokens(6, 9, seed=seed)


def left() -> dict[str, Tensor]:
    """The same texts, the first padded before its first token."""
    return {name: torch.cat([one[:1].roll(2, dims=1), one[1:]]) for name, one in right().items()}


def scored(spec: dict[str, Any]) -> tuple[Any, str]:
    report = Pipeline.from_spec(spec).run()
    return report.tasks["task"], "\n".join(report.warnings)


BARE = {
    "vit": (hf.ViTModel, {**LAYERS, **PICTURE}, pixels(6)),
    "bert": (hf.BertModel, SENTENCES, right()),
    "roberta": (hf.RobertaModel, SENTENCES, right()),
}


@pytest.mark.parametrize("kind", BARE)
def test_a_base_without_its_pooler_is_run_and_loads_again(tmp_path: Path, kind: str) -> None:
    made, config, examples = BARE[kind]
    spec = write(tmp_path, bare(made, **config), bare(made, **config), examples)

    report = Pipeline.from_spec(spec).run()

    assert any("stores no pooler" in one for one in report.warnings)
    result, info = made.from_pretrained(
        tmp_path / "out" / "merged", add_pooling_layer=False, output_loading_info=True
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert not any("pooler" in name for name in result.state_dict())


@pytest.mark.parametrize("kind", BARE)
def test_a_pooler_that_the_base_lacks_is_left_out_and_told(tmp_path: Path, kind: str) -> None:
    made, config, examples = BARE[kind]
    spec = write(tmp_path, bare(made, **config), model(made, **config), examples)

    report = Pipeline.from_spec(spec).run()

    assert any('expert "task"' in one and "pooler" in one for one in report.warnings)
    assert not [
        name for name in load_file(tmp_path / "out" / "merged" / "model.safetensors") if "pooler" in name
    ]


@pytest.mark.parametrize("kind", BARE)
def test_an_expert_without_the_bases_pooler_leaves_it_as_it_is(tmp_path: Path, kind: str) -> None:
    made, config, examples = BARE[kind]
    spec = write(tmp_path, model(made, **config), bare(made, **config), examples)

    Pipeline.from_spec(spec).run()

    before, after = (load_file(tmp_path / at / "model.safetensors") for at in ("base", "out/merged"))
    poolers = [name for name in before if "pooler" in name]
    assert poolers
    assert all(torch.equal(before[name], after[name]) for name in poolers)


CLASSIFIERS = {
    "vit": (hf.ViTModel, hf.ViTForImageClassification, {**LAYERS, **PICTURE, "num_labels": 5}, pixels(6)),
    "bert": (hf.BertModel, hf.BertForSequenceClassification, SENTENCES, right()),
    "roberta": (hf.RobertaModel, hf.RobertaForSequenceClassification, SENTENCES, right()),
    "camembert": (hf.CamembertModel, hf.CamembertForSequenceClassification, SENTENCES, right()),
}


@pytest.mark.parametrize("kind", CLASSIFIERS)
def test_a_classifier_on_a_base_without_a_pooler_is_scored_as_it_answers(tmp_path: Path, kind: str) -> None:
    made, classifier, config, examples = CLASSIFIERS[kind]
    spec = write(tmp_path, bare(made, **config), model(classifier, **config), examples)

    task, _ = scored(spec)

    assert task.scores.expert == 1.0  # the labels are what the whole expert says


def test_heads_with_a_layer_of_their_own_are_kept_and_loaded_again(tmp_path: Path) -> None:
    made, classifier, config, examples = CLASSIFIERS["roberta"]
    spec = write(tmp_path, bare(made, **config), model(classifier, **config), examples)
    scored(spec)

    head = load_head(tmp_path / "out" / "heads" / "task.safetensors", task="task")

    expert = classifier.from_pretrained(tmp_path / "expert").eval()
    hidden_BF = expert.roberta(**examples).last_hidden_state[:, 0]
    torch.testing.assert_close(head(hidden_BF), expert(**examples).logits)
    assert head.shape == (5, 32)


@pytest.mark.parametrize(
    "kind", [hf.ElectraForSequenceClassification, hf.DistilBertForSequenceClassification]
)
def test_other_classes_with_a_layer_before_the_classifier_are_scored_too(tmp_path: Path, kind: Any) -> None:
    config = dict(SENTENCES)
    if kind is hf.DistilBertForSequenceClassification:
        config = {"dim": 32, "hidden_dim": 64, "n_layers": 1, "n_heads": 4, **TEXT, "num_labels": 5}
    spec = write(tmp_path, model(kind, **config), model(kind, **config), right())

    assert scored(spec)[0].scores.expert == 1.0


def test_a_head_that_reads_tokens_is_refused_on_a_base_with_a_pooler(tmp_path: Path) -> None:
    made, classifier, config, examples = CLASSIFIERS["roberta"]
    spec = write(tmp_path, model(made, **config), model(classifier, **config), examples)

    with pytest.raises(
        DataError, match=r"reads the first token, and the base has a pooler[\s\S]*add_pooling"
    ):
        Pipeline.from_spec(spec).tasks()


def test_texts_padded_before_their_first_token_are_scored_alike(tmp_path: Path) -> None:
    made, classifier, config, _ = CLASSIFIERS["roberta"]
    (tmp_path / "left").mkdir(), (tmp_path / "right").mkdir()
    reports = []
    for side, examples in {"left": left(), "right": right()}.items():
        spec = write(tmp_path / side, bare(made, **config), model(classifier, **config), right())
        labels = load_file(tmp_path / side / "test.safetensors")["labels"]
        save_file({**examples, "labels": labels}, tmp_path / side / "test.safetensors")
        save_file(examples, tmp_path / side / "calibration.safetensors")
        reports.append(scored(spec)[0])

    assert [one.scores.expert for one in reports] == [1.0, 1.0]


def test_texts_padded_before_their_first_token_are_refused_under_a_pooler(tmp_path: Path) -> None:
    config = SENTENCES
    spec = write(
        tmp_path, model(hf.BertModel, **config), model(hf.BertForSequenceClassification, **config), left()
    )

    with pytest.raises(DataError, match="1 of 6 texts are padded at their beginning") as caught:
        Pipeline.from_spec(spec).tasks()

    assert {one.where for one in caught.value.problems} == {"tasks.task.calibration", "tasks.task.test"}


def test_a_language_models_last_token_is_found_on_either_side_of_padding() -> None:
    from merging.backbones.pretrained import first_token, last_token

    x_BTV = torch.arange(8.0).reshape(2, 4, 1)
    for dtype in (torch.long, torch.bool, torch.float32):
        mask_BT = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 0]]).to(dtype)
        assert last_token(x_BTV, mask_BT).flatten().tolist() == [3.0, 6.0]
        assert first_token(x_BTV, mask_BT).flatten().tolist() == [2.0, 4.0]
