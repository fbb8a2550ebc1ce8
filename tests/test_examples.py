"""The specs under examples/: each validates and plans, with tiny stand-ins for the models and data it
names."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import huggingface_hub.constants
import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from safetensors.torch import save_file
from tiny_models import PICTURE, SIZE, TEXT, expert_of
from tiny_texts import saved as saved_text
from tokenizers import Tokenizer, pre_tokenizers, processors
from tokenizers import models as token_models

from merging.checkpoints.hub import resolve
from merging.pipeline import Pipeline
from merging.spec import load_spec

EXAMPLES = Path(__file__).parent.parent / "examples"
LOCAL = sorted(EXAMPLES.glob("*.json"))
PUBLISHED = sorted((EXAMPLES / "published").glob("*.json"))
COMMIT = "0123456789abcdef0123456789abcdef01234567"
CLASSES = ("annual_crop", "big bird", "0")


def name_of(path: Path) -> str:
    return path.stem


# Stand-ins


def pictures(folder: Path, count: int) -> None:
    random = np.random.default_rng(count)
    for name in CLASSES:
        (folder / name).mkdir(parents=True)
        for number in range(count):
            pixels = random.integers(0, 256, (32, 32, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{number}.png")


def processor(folder: Path) -> None:
    sizes = {"size": {"shortest_edge": 32}, "crop_size": {"height": 32, "width": 32}}
    transformers.CLIPImageProcessor(**sizes).save_pretrained(folder)


def whole_clip(folder: Path) -> Any:
    """A CLIPModel with its tokenizer and processor."""
    torch.manual_seed(0)
    text = transformers.CLIPTextConfig(**SIZE, **{**TEXT, "max_position_embeddings": 32}).to_dict()
    vision = transformers.CLIPVisionConfig(**SIZE, **PICTURE, projection_dim=16).to_dict()
    model = transformers.CLIPModel(
        transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=16)
    )
    model.save_pretrained(folder)
    words = Tokenizer(token_models.WordLevel({"[pad]": 0, "[start]": 1, "[end]": 2, "[unk]": 3}, "[unk]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.post_processor = processors.TemplateProcessing(
        single="[start] $A [end]", special_tokens=[("[start]", 1), ("[end]", 2)]
    )
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="[pad]", bos_token="[start]", eos_token="[end]", unk_token="[unk]"
    ).save_pretrained(folder)
    processor(folder)
    return model


def towers(folder: Path, names: list[str]) -> None:
    """Vision experts beside `base`, which is written, too."""
    torch.manual_seed(0)
    base = transformers.CLIPVisionModel(transformers.CLIPVisionConfig(**SIZE, **PICTURE))
    base.save_pretrained(folder / "base")
    processor(folder / "base")
    for seed, name in enumerate(names, start=1):
        expert = transformers.CLIPVisionModel(base.config)
        expert.load_state_dict(expert_of(base, seed))
        expert.save_pretrained(folder / name)


def vision_data(folder: Path, *, head: bool) -> None:
    for task in ("flowers", "signs"):
        pictures(folder / "data" / task / "train", 3)
        pictures(folder / "data" / task / "test", 2)
        if head:
            (folder / "heads").mkdir(exist_ok=True)
            save_file({"weight": torch.randn(3, 32)}, folder / "heads" / f"{task}.safetensors")


def rows(folder: Path, task: str, some: list[dict[str, str]]) -> None:
    for split in ("train", "test"):
        (folder / "data" / task).mkdir(parents=True, exist_ok=True)
        lines = "".join(f"{json.dumps({**row, 'number': n})}\n" for n, row in enumerate(some * 3))
        (folder / "data" / task / f"{split}.jsonl").write_text(lines)


def vision(folder: Path) -> None:
    towers(folder / "models", ["flowers", "signs"])
    vision_data(folder, head=True)


def vision_lora(folder: Path) -> None:
    from peft_adapters import adapted

    towers(folder / "models", [])
    base = transformers.CLIPVisionModel.from_pretrained(folder / "models" / "base")
    for seed, task in enumerate(("flowers", "signs")):
        adapted(base, folder / "adapters" / task, seed=seed, target_modules=["q_proj", "v_proj"])
    vision_data(folder, head=True)


def open_clip(folder: Path) -> None:
    from open_clip_models import built, saved

    text = {"context_length": 16, "vocab_size": 49408, "width": 32, "heads": 4, "layers": 2}
    base = built(text_cfg=text)
    for seed, name in enumerate(("base", "flowers", "signs")):
        tensors = expert_of(base, seed) if seed else base.state_dict()
        saved(folder / "models" / name, tensors, text_cfg=text)
    vision_data(folder, head=False)


def text_models(folder: Path, kind: str, tasks: list[str], adapters: bool) -> None:
    base = saved_text(folder / "models", kind, [] if adapters else tasks)
    shutil.move(folder / "models" / "base", folder / "models" / kind)
    if adapters:
        from peft_adapters import adapted

        for seed, task in enumerate(tasks):
            adapted(base, folder / "adapters" / task, seed=seed, target_modules=LAYERS[kind])


def t5(folder: Path, *, adapters: bool = False) -> None:
    text_models(folder, "t5", ["nli", "headline"], adapters)
    answers = ("entailment", "neutral", "contradiction")
    rows(folder, "nli", [{"premise": "a", "hypothesis": "b", "answer": a, "label": a} for a in answers])
    rows(folder, "headline", [{"article": "the film was good", "title": "good film"}])


def llama(folder: Path, *, adapters: bool = False) -> None:
    text_models(folder, "llama", ["movie", "spam"], adapters)
    rows(folder, "movie", [{"text": "good film", "label": "pos"}, {"text": "bad film", "label": "neg"}])
    rows(folder, "spam", [{"text": "read it", "label": "spam"}, {"text": "the book", "label": "ham"}])


LAYERS = {"t5": ["q", "v"], "llama": ["q_proj", "v_proj"]}
SAME_EXAMPLES = ['allow=["overlap"]']  # the stand-ins have the same few examples in every split

STAND_INS = {
    "vision": vision,
    "vision-lora": vision_lora,
    "open-clip": open_clip,
    "t5": t5,
    "t5-lora": partial(t5, adapters=True),
    "llama": llama,
    "llama-lora": partial(llama, adapters=True),
}


def widen_(folder: Path, words: set[str]) -> None:
    """The stand-in reads a few dozen words in short texts: let it know the answers, and read long ones."""
    file = folder / "tokenizer.json"
    about = json.loads(file.read_text())
    known = about["model"]["vocab"]
    for word, old in zip(sorted(words - set(known)), list(known)[-1:3:-1], strict=False):
        known[word] = known.pop(old)
    file.write_text(json.dumps(about))
    config = json.loads((folder / "config.json").read_text())
    if "max_position_embeddings" in config:
        config["max_position_embeddings"] = 2048
        (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("path", LOCAL, ids=name_of)
def test_a_spec_for_ones_own_models_validates_and_plans(path: Path, tmp_path: Path) -> None:
    STAND_INS[path.stem](tmp_path)
    kind = path.stem.removesuffix("-lora")
    answers = {"t5": {"entailment", "neutral", "contradiction"}, "llama": {"negative", "positive"}}
    if kind in answers:
        widen_(tmp_path / "models" / kind, answers[kind] | {"no", "yes"})
        for config in (tmp_path / "models").glob("*/config.json"):
            if config.parent.name != kind:
                shutil.copy(tmp_path / "models" / kind / "config.json", config)
    shutil.copy(path, tmp_path / "spec.json")

    pipeline = Pipeline.from_spec(tmp_path / "spec.json", sets=SAME_EXAMPLES)
    pipeline.validate()
    plan = pipeline.plan()

    methods = [step.method for step in plan.steps]
    assert methods == [pipeline.spec.merge.type, "featcal", "scores and drift"]
    assert set(plan.tasks) == set(pipeline.spec.experts)


def test_there_is_a_spec_of_every_kind() -> None:
    assert {path.stem for path in LOCAL} == set(STAND_INS)


# Published settings: models out of an offline cache of the hub, data sets of their names


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of the hub, and no network."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(
        "huggingface_hub.snapshot_download",
        partial(huggingface_hub.snapshot_download, cache_dir=str(tmp_path / "hub")),
    )
    return tmp_path / "hub"


def in_cache(hub: Path, repo_id: str) -> Path:
    """Where the files of a model lie in the cache."""
    repository = hub / f"models--{repo_id.replace('/', '--')}"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(COMMIT)
    snapshot = repository / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    return snapshot


def published_clip(hub: Path, spec: Any) -> None:
    base = whole_clip(in_cache(hub, spec.base.model))
    tower = transformers.CLIPVisionModel(base.config.vision_config)
    tower.load_state_dict(
        {name: value for name, value in base.state_dict().items() if name.startswith("vision_model.")}
        if next(iter(tower.state_dict())).startswith("vision_model.")
        else base.vision_model.state_dict()
    )
    for seed, ref in enumerate(spec.experts.values(), start=1):
        expert = transformers.CLIPVisionModel(tower.config)
        expert.load_state_dict(expert_of(tower, seed))
        expert.save_pretrained(in_cache(hub, ref.ref.model))


def published_text(kind: str, hub: Path, spec: Any) -> None:
    scratch = hub.parent / "models"
    saved_text(scratch, kind, list(spec.experts))
    wordy = {"acceptable", "unacceptable", "entailment", "neutral", "contradiction", "yes", "no"}
    widen_(scratch / "base", wordy | {"negative", "positive"})
    shutil.copytree(scratch / "base", in_cache(hub, spec.base.model), dirs_exist_ok=True)
    for task, ref in spec.experts.items():
        snapshot = in_cache(hub, ref.ref.model)
        shutil.copytree(scratch / task, snapshot, dirs_exist_ok=True)
        shutil.copy(scratch / "base" / "config.json", snapshot)


def stand_in(spec: Any, asked: list[tuple[str, str | None]]) -> Any:
    """Answers for `datasets.load_dataset`: the columns that the spec reads of the data set of that name."""
    sources = [
        source
        for task in spec.tasks.values()
        for source in (task.calibration, task.test)
        if source is not None
    ]

    def load(path: str, config: str | None = None, **_: Any) -> datasets.DatasetDict:
        asked.append((path, config))
        of_name = [one for one in sources if (one.path, one.config) == (path, config)]
        return datasets.DatasetDict({one.split: made(one) for one in of_name})

    def made(one: Any) -> datasets.Dataset:
        if one.image is not None:
            random = np.random.default_rng(0)
            shown = [Image.fromarray(random.integers(0, 256, (32, 32, 3), dtype=np.uint8)) for _ in CLASSES]
            features = {"image": datasets.Image(), "label": datasets.ClassLabel(names=list(CLASSES))}
            made = {one.image: shown, one.label: list(range(len(CLASSES)))}
            return datasets.Dataset.from_dict(made, features=datasets.Features(features))
        from merging.data.prompts import Template

        columns = Template(one.template).columns
        count = len(one.labels) if one.labels else 3
        made = {column: [f"the film {number}" for number in range(count)] for column in columns}
        if one.label is not None:
            made[one.label] = list(range(count))
        return datasets.Dataset.from_dict(made)

    return load


KINDS = {
    "clip": published_clip,
    "flan": partial(published_text, "t5"),
    "mergebench": partial(published_text, "llama"),
}


@pytest.mark.parametrize("path", PUBLISHED, ids=name_of)
def test_a_published_setting_validates_and_plans_offline(
    path: Path, hub: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = load_spec(path)
    asked: list[tuple[str, str | None]] = []
    KINDS[path.stem.split("-")[0]](hub, spec)
    monkeypatch.setattr(datasets, "load_dataset", stand_in(spec, asked))

    pipeline = Pipeline.from_spec(path, sets=SAME_EXAMPLES)
    pipeline.validate()
    plan = pipeline.plan()

    assert resolve(spec.base.model, folder=EXAMPLES).revision == COMMIT
    assert set(plan.tasks) == set(spec.experts)
    assert all(task.calibration_used for task in plan.tasks.values())
    assert len(set(asked)) == len(
        {(one.calibration.path, one.calibration.config) for one in spec.tasks.values()}
    )
    heads = {name: task.head for name, task in pipeline.tasks().items()}
    if path.stem.startswith("clip"):
        assert {head.names for head in heads.values()} == {("annual crop", "big bird", "0")}


@pytest.mark.parametrize("path", PUBLISHED, ids=name_of)
def test_a_published_setting_says_what_is_expected_and_whose_number_it_is(path: Path) -> None:
    spec = load_spec(path)

    assert spec.notes is not None
    assert "arXiv:" in spec.notes
    assert "Expected" in spec.notes
    assert "none of ours" in spec.notes


def test_a_clip_spec_names_the_eight_experts() -> None:
    spec = load_spec(EXAMPLES / "published" / "clip-vit-b32-featcal.json")

    names = ("sun397", "stanford-cars", "resisc45", "eurosat", "svhn", "gtsrb", "mnist", "dtd")
    assert {task: ref.ref.model for task, ref in spec.experts.items()} == {
        name: f"tanganke/clip-vit-base-patch32_{name}" for name in names
    }


def test_every_example_is_on_the_page() -> None:
    page = (EXAMPLES.parent / "docs" / "examples.md").read_text(encoding="utf-8")

    for path in (*LOCAL, *PUBLISHED):
        assert f"(../{path.relative_to(EXAMPLES.parent).as_posix()})" in page
