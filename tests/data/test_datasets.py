"""Data sets of the `datasets` library: saved by it, or folders and files that it reads."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from PIL import Image
from tiny_texts import saved, sentences, written
from transformers import CLIPImageProcessor

from merging.data.opening import open_examples
from merging.data.spec import DatasetData, ImagesData, TextData
from merging.errors import DataError

ANSWERS = {"neg": " neg", "pos": " pos"}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    saved(folder, "llama")
    CLIPImageProcessor(size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16}).save_pretrained(
        folder / "base"
    )
    return folder / "base"


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def opened(spec: Any, base: Path) -> Any:
    return open_examples(spec, task="movie", purpose="test", base_folder=base, seed=0, labelled=False)


def as_dataset(rows: list[dict[str, Any]]) -> datasets.Dataset:
    names = datasets.ClassLabel(names=["neg", "pos"])
    return datasets.Dataset.from_list(rows).cast_column("label", names)


@pytest.mark.parametrize("form", ["saved", "saved splits", "folder", "file"])
def test_rows_are_those_of_the_same_text_file(tmp_path: Path, base: Path, form: str) -> None:
    rows = sentences(8)
    place, keys = tmp_path / "data", {}
    if form == "saved":
        as_dataset(rows).save_to_disk(place)
    elif form == "saved splits":
        datasets.DatasetDict(train=as_dataset(rows[:2]), test=as_dataset(rows)).save_to_disk(place)
        keys = {"split": "test"}
    elif form == "folder":
        place.mkdir()
        as_dataset(rows[:2]).to_parquet(place / "train.parquet")
        as_dataset(rows).to_parquet(place / "test.parquet")
        keys = {"split": "test"}
    else:
        place = tmp_path / "data.csv"
        datasets.Dataset.from_list(rows).to_csv(place, index=False)
    shared: dict[str, Any] = {"prompt": "{text}\nAnswer:", "label": "label", "labels": ANSWERS, "examples": 6}

    found = opened(DatasetData(path=str(place), **shared, **keys), base)

    expected = opened(TextData(path=written(tmp_path / "x.jsonl", rows), **shared), base)
    assert found.fingerprint == expected.fingerprint
    assert found.labels.tolist() == expected.labels.tolist()


def test_pictures_are_those_of_the_same_folder(tmp_path: Path, base: Path) -> None:
    random = np.random.default_rng(0)
    for name in ("ant", "bee"):
        (tmp_path / "images" / name).mkdir(parents=True)
        for number in range(3):
            picture = Image.fromarray(random.integers(0, 256, (20, 24, 3), dtype=np.uint8))
            picture.save(tmp_path / "images" / name / f"{number}.png")
    files = sorted((tmp_path / "images").rglob("*.png"))
    table = datasets.Dataset.from_dict(
        {"picture": [str(file) for file in files], "kind": [file.parent.name for file in files]}
    ).cast_column("picture", datasets.Image())
    table.save_to_disk(tmp_path / "data")

    found = opened(DatasetData(path=str(tmp_path / "data"), image="picture", label="kind"), base)

    expected = opened(ImagesData(path=tmp_path / "images"), base)
    assert found.labels.tolist() == expected.labels.tolist()
    for ours, theirs in zip(found.batches(), expected.batches(), strict=True):
        assert torch.equal(ours["pixel_values"], theirs["pixel_values"])
    assert opened(DatasetData(path=str(tmp_path / "data"), image="picture"), base).labels is None


def test_what_is_missing_is_told(tmp_path: Path, base: Path) -> None:
    splits = datasets.DatasetDict(train=as_dataset(sentences(2)), test=as_dataset(sentences(2)))
    splits.save_to_disk(tmp_path / "data")
    cases = {
        "has several splits; there are: train, test": {},
        '(?s)has no split "tests"; there are: train, test.*did you mean "test"': {"split": "tests"},
        'has no column "txt"; it has text, label': {"split": "test", "input": "txt"},
        'column "text" is Value, expected pictures': {"split": "test", "image": "text"},
    }

    for message, keys in cases.items():
        with pytest.raises(DataError, match=message):
            opened(DatasetData(path=str(tmp_path / "data"), **keys), base)


def test_a_folder_that_is_no_data_set(tmp_path: Path, base: Path) -> None:
    (tmp_path / "data").mkdir()

    with pytest.raises(DataError, match=r"(?s)cannot be opened.*save_to_disk"):
        opened(DatasetData(path=str(tmp_path / "data")), base)


def test_a_broken_file_is_told_by_what_is_wrong_with_it(tmp_path: Path, base: Path) -> None:
    (tmp_path / "rows.json").write_text("{nope")

    with pytest.raises(DataError, match=r"rows.json\" cannot be opened: JSON parse error"):
        opened(DatasetData(type="dataset", path=str(tmp_path / "rows.json")), base)


def test_a_name_on_the_hub_without_network(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)

    with pytest.raises(DataError, match=r'(?s)data set "nobody/nothing" cannot be opened.*network'):
        opened(DatasetData(path="nobody/nothing"), base)


def test_damaged_pictures_are_named(tmp_path: Path, base: Path) -> None:
    rows = [{"picture": {"bytes": b"no picture", "path": None}}]
    features = datasets.Features({"picture": datasets.Image()})
    datasets.Dataset.from_list(rows, features=features).save_to_disk(tmp_path / "data")

    with pytest.raises(DataError, match=r"(?s)1 of 1 images cannot be used.*data:0: not a whole image"):
        opened(DatasetData(path=str(tmp_path / "data"), image="picture"), base)


def test_without_the_extra_the_install_line_is_told(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)

    with pytest.raises(DataError, match=r"merging\[data\]"):
        opened(DatasetData(path="nobody/nothing"), base)
