"""Files beside the weights that libraries read: what these raise over them is told as an error of ours."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from tiny_texts import saved, sentences, written
from transformers import CLIPImageProcessor

from merging.architecture import transformers_config
from merging.checkpoints.vocabularies import read_vocabulary
from merging.data.images import image_processor
from merging.data.opening import open_examples
from merging.data.spec import ImagesData
from merging.data.text_spec import TextData
from merging.data.tokenizer import text_reader
from merging.errors import CheckpointError, DataError, MergingError, SpecError
from merging.libraries import reading_with


def changed(file: Path, *path: str, to: Any) -> None:
    content = json.loads(file.read_text())
    place = content
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = to
    file.write_text(json.dumps(content))


def refused(kind: type[MergingError], action: Any) -> str:
    with pytest.raises(kind) as caught:
        action()
    assert "Traceback" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("key", "value"), [("num_hidden_layers", {"a": 2}), ("bos_token_id", [1]), ("rope_parameters", [1])]
)
def test_a_config_with_a_field_of_another_kind(tmp_path: Path, key: str, value: Any) -> None:
    saved(tmp_path, "llama")
    changed(tmp_path / "base" / "config.json", key, to=value)

    said = refused(SpecError, lambda: transformers_config(tmp_path / "base"))

    assert f"the config of {tmp_path / 'base'} cannot be used" in said


def test_a_tokenizer_with_a_special_token_that_is_none(tmp_path: Path) -> None:
    saved(tmp_path, "llama")
    changed(tmp_path / "base" / "tokenizer_config.json", "unk_token", to={"a": 1})

    said = refused(DataError, lambda: text_reader(tmp_path / "base", 'task "movie": test'))

    assert 'task "movie": test: the base\'s tokenizer' in said


@pytest.mark.parametrize("at", ["7", -1, 1.5, None, 10**30])
def test_a_token_whose_id_is_none(tmp_path: Path, at: Any) -> None:
    saved(tmp_path, "llama")
    changed(tmp_path / "base" / "tokenizer.json", "model", "vocab", "film", to=at)

    said = refused(CheckpointError, lambda: read_vocabulary(tmp_path / "base"))

    assert "tokenizer.json is damaged: it maps the token 'film'" in said


def test_added_tokens_that_are_no_mapping_are_passed_over(tmp_path: Path) -> None:
    saved(tmp_path, "llama")
    changed(tmp_path / "base" / "tokenizer_config.json", "added_tokens_decoder", to=[1])

    assert read_vocabulary(tmp_path / "base") is not None


@pytest.mark.parametrize(("key", "value"), [("resample", []), ("image_mean", "a"), ("rescale_factor", "x")])
def test_an_image_processor_that_fails_on_every_picture(tmp_path: Path, key: str, value: Any) -> None:
    CLIPImageProcessor(size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16}).save_pretrained(
        tmp_path
    )
    changed(tmp_path / "preprocessor_config.json", key, to=value)
    (tmp_path / "data" / "a").mkdir(parents=True)
    Image.fromarray(np.zeros((20, 20, 3), dtype=np.uint8)).save(tmp_path / "data" / "a" / "0.png")
    spec = ImagesData(path=tmp_path / "data")

    said = refused(
        DataError,
        lambda: open_examples(spec, task="x", purpose="calibration", base_folder=tmp_path, seed=0),
    )

    assert "0.png" in said or "image processor" in said


def test_good_files_are_read(tmp_path: Path) -> None:
    saved(tmp_path, "llama")
    base = tmp_path / "base"
    CLIPImageProcessor().save_pretrained(base)
    spec = TextData(path=written(tmp_path / "x.jsonl", sentences(3)))

    assert transformers_config(base).model_type == "llama"
    assert image_processor(base, "x") is not None
    assert len(open_examples(spec, task="x", purpose="calibration", base_folder=base, seed=0)) == 3


def test_an_error_of_ours_and_an_interrupt_pass_as_they_are() -> None:
    for error in (DataError("as it was"), KeyboardInterrupt()):
        with pytest.raises(type(error)) as caught, reading_with(SpecError, "not this"):
            raise error
        assert caught.value is error


def test_the_reason_is_the_librarys_first_words_and_kind() -> None:
    with pytest.raises(SpecError, match=r"cannot be used: field 'a': no number \(TypeError\)$"):  # noqa: SIM117
        with reading_with(SpecError, "cannot be used"):
            raise TypeError("field 'a':\n   no number\nand more")
