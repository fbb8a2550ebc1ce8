"""Zero-shot heads: the classifier that open_clip's code and transformers' text tower make; clear refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import open_clip
import pytest
import torch
import transformers
from open_clip_models import built, saved
from safetensors.torch import load_file, save_file
from tiny_models import PICTURE, SIZE, TEXT, expert_of, pixels
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from merging.data.heads import load_head, save_head
from merging.data.task import LinearHead
from merging.data.zero_shot import zero_shot_head
from merging.data.zero_shot_spec import ZeroShotHeadSpec
from merging.errors import DataError, MergingError, SpecError
from merging.pipeline import Pipeline

NAMES = ("cat", "dog", "big bird")
TEMPLATES = ("a photo of a {}.", "the {}")
WORDS = ["[pad]", "[start]", "[end]", "a", "photo", "of", "the", ".", "cat", "dog", "big", "bird", "[unk]"]


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An open_clip folder; the tokenizer is open_clip's own, which needs no files."""
    text = {"context_length": 16, "vocab_size": 49408, "width": 32, "heads": 4, "layers": 2}
    return saved(tmp_path_factory.mktemp("oclip") / "base", built(text_cfg=text).state_dict(), text_cfg=text)


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A CLIPModel of transformers with a small tokenizer."""
    folder = tmp_path_factory.mktemp("clip") / "base"
    torch.manual_seed(0)
    text = transformers.CLIPTextConfig(**SIZE, **{**TEXT, "max_position_embeddings": 16}).to_dict()
    vision = transformers.CLIPVisionConfig(**SIZE, **PICTURE, projection_dim=16).to_dict()
    config = transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=16)
    transformers.CLIPModel(config).save_pretrained(folder)
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[unk]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.post_processor = processors.TemplateProcessing(
        single="[start] $A [end]", special_tokens=[("[start]", 1), ("[end]", 2)]
    )
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="[pad]", eos_token="[end]", bos_token="[start]"
    ).save_pretrained(folder)
    return folder


def head_of(base: Path, **changes: Any) -> LinearHead:
    spec = ZeroShotHeadSpec(**{"classes": NAMES, "templates": TEMPLATES, **changes})
    return zero_shot_head(spec, task="animals", base=base)


def test_the_head_is_the_one_that_open_clip_builds(ours: Path) -> None:
    head = head_of(ours)

    model = open_clip.create_model(f"local-dir:{ours}").eval()
    tokenizer = open_clip.get_tokenizer(f"local-dir:{ours}")
    expected = open_clip.build_zero_shot_classifier(model, tokenizer, NAMES, TEMPLATES)
    assert head.shape == (3, 16)
    torch.testing.assert_close(head.weight_CF, (model.logit_scale.exp() * expected).T.detach())


def test_the_head_is_what_the_text_tower_of_transformers_gives(theirs: Path) -> None:
    head = head_of(theirs)

    model = transformers.CLIPModel.from_pretrained(theirs).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(theirs)
    rows = []
    with torch.no_grad():
        for name in NAMES:
            batch = tokenizer(
                [one.replace("{}", name) for one in TEMPLATES], padding=True, return_tensors="pt"
            )
            inputs = {key: batch[key] for key in ("input_ids", "attention_mask")}
            found = model.get_text_features(**inputs)
            found = getattr(found, "pooler_output", found)
            rows.append(torch.nn.functional.normalize(found, dim=-1).mean(0))
        expected = model.logit_scale.exp() * torch.nn.functional.normalize(torch.stack(rows), dim=-1)
    torch.testing.assert_close(head.weight_CF, expected, rtol=1e-5, atol=1e-5)


def test_scores_are_clips_logits_and_survive_a_file(ours: Path, tmp_path: Path) -> None:
    head = head_of(ours)
    features_BF = 7 * torch.randn(5, 16, generator=torch.Generator().manual_seed(0))

    save_head(head, tmp_path / "animals.safetensors")
    again = load_head(tmp_path / "animals.safetensors", task="animals")

    cosine_BC = (
        torch.nn.functional.normalize(features_BF, dim=-1)
        @ torch.nn.functional.normalize(head.weight_CF, dim=-1).T
    )
    torch.testing.assert_close(head(features_BF), cosine_BC / 0.07)
    assert torch.equal(again(features_BF), head(features_BF))
    assert again.fingerprint == head.fingerprint


@pytest.mark.parametrize("form", ["text", "json"])
def test_class_names_may_come_from_a_file(ours: Path, tmp_path: Path, form: str) -> None:
    file = tmp_path / ("names.json" if form == "json" else "names.txt")
    file.write_text(json.dumps(NAMES) if form == "json" else "cat\n\ndog\nbig bird\n")

    assert head_of(ours, classes=file).names == NAMES


def spec_of(base: Path, folder: Path, **head: Any) -> dict[str, Any]:
    """One expert, labels as it classifies."""
    task = {
        "test": {"type": "tensors", "path": str(folder / "test.safetensors")},
        "head": {"type": "zero_shot", "classes": list(NAMES), "templates": list(TEMPLATES), **head},
    }
    return {
        "base": str(base),
        "experts": {"animals": str(base)},
        "merge": {"type": "average"},
        "tasks": {"animals": task},
        "device": "cpu",
    }


@pytest.mark.parametrize("kind", ["ours", "theirs"])
def test_a_run_scores_with_it_and_leaves_it(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    base: Path = request.getfixturevalue(kind)
    images = pixels(6)
    save_file({**images, "labels": torch.tensor([0, 1, 2, 0, 1, 2])}, tmp_path / "test.safetensors")

    report = Pipeline.from_spec(spec_of(base, tmp_path)).run(tmp_path / "out")

    scores = report.tasks["animals"].scores
    assert scores.merged == scores.base is not None
    assert torch.equal(
        load_file(tmp_path / "out" / "heads" / "animals.safetensors")["weight"], head_of(base).weight_CF
    )


@pytest.mark.parametrize(
    ("head", "told"),
    [
        ({"classes": []}, '"classes" has 0 names'),
        ({"classes": ["cat", " "]}, "an empty name"),
        ({"templates": []}, '"templates" is empty'),
        ({"templates": ["a photo."]}, r'"a photo\." has no \{\}'),
        ({"classes": "nowhere.txt"}, r'no such file: "nowhere\.txt"'),
        ({"model": "./nowhere"}, r'no such folder: "\./nowhere"'),
        ({"clases": ["cat", "dog"]}, '"?clases'),
    ],
)
def test_a_head_that_cannot_be_is_found_in_the_spec(
    ours: Path, tmp_path: Path, head: dict[str, Any], told: str
) -> None:
    save_file({**pixels(3), "labels": torch.tensor([0, 1, 2])}, tmp_path / "test.safetensors")

    with pytest.raises(SpecError) as caught:
        Pipeline.from_spec(spec_of(ours, tmp_path, **head)).validate()

    assert caught.match(told) or any(told in str(problem) for problem in caught.value.problems)


def test_a_tower_without_text_asks_for_the_whole_clip(theirs: Path, ours: Path, tmp_path: Path) -> None:
    save_file({**pixels(3), "labels": torch.tensor([0, 1, 2])}, tmp_path / "test.safetensors")
    tower = transformers.CLIPVisionModelWithProjection.from_pretrained(theirs)
    tower.save_pretrained(tmp_path / "tower")
    spec = spec_of(tmp_path / "tower", tmp_path)

    with pytest.raises(DataError, match="no whole CLIP with a text tower"):
        Pipeline.from_spec(spec).validate()

    spec["tasks"]["animals"]["head"]["model"] = str(theirs)
    Pipeline.from_spec(spec).validate()


def test_a_text_tower_of_other_features_is_found_before_the_work(
    theirs: Path, ours: Path, tmp_path: Path
) -> None:
    save_file({**pixels(3), "labels": torch.tensor([0, 1, 2])}, tmp_path / "test.safetensors")
    tower = transformers.CLIPVisionModel.from_pretrained(theirs)
    tower.save_pretrained(tmp_path / "tower")

    with pytest.raises(DataError, match="reads 16 features, the model gives 32"):
        Pipeline.from_spec(spec_of(tmp_path / "tower", tmp_path, model=str(theirs))).validate()


def test_classes_in_another_order_than_the_folders_are_found(ours: Path, tmp_path: Path) -> None:
    from PIL import Image

    for name in ("big_bird", "cat", "dog"):
        (tmp_path / "test" / name).mkdir(parents=True)
        Image.new("RGB", (32, 32), (9, 90, 200)).save(tmp_path / "test" / name / "one.png")
    spec = spec_of(ours, tmp_path)
    spec["tasks"]["animals"]["test"] = {"type": "images", "path": str(tmp_path / "test")}

    with pytest.raises(MergingError, match="number the classes big bird, cat, dog"):
        Pipeline.from_spec(spec).validate()


def test_a_tokenizer_larger_than_the_text_tower_is_refused(tmp_path: Path) -> None:
    base = saved(tmp_path / "base", expert_of(built(), 0))

    with pytest.raises(DataError, match="49408 tokens, the text tower 99 embeddings"):
        head_of(base)


def test_names_that_are_not_given_are_those_of_the_folders(ours: Path, tmp_path: Path) -> None:
    from PIL import Image

    for name in ("big_bird", "cat", "dog"):
        (tmp_path / "test" / name).mkdir(parents=True)
        Image.new("RGB", (32, 32), (9, 90, 200)).save(tmp_path / "test" / name / "one.png")
    spec = spec_of(ours, tmp_path)
    spec["tasks"]["animals"]["test"] = {"type": "images", "path": str(tmp_path / "test")}
    del spec["tasks"]["animals"]["head"]["classes"]

    head = Pipeline.from_spec(spec).tasks()["animals"].head

    assert head is not None
    assert head.names == ("big bird", "cat", "dog")


def test_examples_that_name_no_classes_ask_for_names(ours: Path, tmp_path: Path) -> None:
    save_file({**pixels(3), "labels": torch.tensor([0, 1, 2])}, tmp_path / "test.safetensors")
    spec = spec_of(ours, tmp_path)
    del spec["tasks"]["animals"]["head"]["classes"]

    with pytest.raises(DataError, match="examples name no classes, and the head lists none"):
        Pipeline.from_spec(spec).validate()
