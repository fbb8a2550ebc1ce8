"""An output folder that would lie among the inputs is refused, however it is given."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tiny_pictures import picture_suite

from merging.errors import OutputError, SpecError
from merging.pipeline import Pipeline
from merging.spec import load_spec, parse_spec

INSIDE = [
    "base",
    "digits",
    "digits/out",
    "img/digits/train",
    "img/digits/train/zz",
    "img/digits/test/a",
    "link/out",
]


def suite(folder: Path) -> Path:
    spec = picture_suite(folder)
    (folder / "link").symlink_to("digits")
    (folder / "spec.json").write_text(json.dumps(spec))
    return folder / "spec.json"


def test_an_output_that_is_given_beside_the_spec_is_looked_at_too(tmp_path: Path) -> None:
    pipeline = Pipeline.from_spec(suite(tmp_path))
    before = sorted(tmp_path.rglob("*"))

    for place in INSIDE:
        with pytest.raises(OutputError, match="or inside it"):
            pipeline.run(tmp_path / place, overwrite=True)

    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("place", INSIDE)
def test_an_output_in_the_spec_is_refused_where_it_is_read(tmp_path: Path, place: str) -> None:
    with pytest.raises(SpecError, match=r"output\.path: is the folder of"):
        load_spec(suite(tmp_path), [f"output.path={place}"])


def test_what_an_earlier_run_left_is_no_input_of_a_run_into_the_same_folder(tmp_path: Path) -> None:
    (tmp_path / "out" / "merged").mkdir(parents=True)
    raw = {"base": "out/merged", "experts": {"a": "org/a"}, "merge": "average", "output": "out"}

    with pytest.raises(SpecError, match='holds the base in "merged", where the run writes'):
        parse_spec(raw, tmp_path, "s")


def test_inputs_beside_what_a_run_writes_are_no_matter(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "x.safetensors").touch()
    test = {"type": "tensors", "path": "x.safetensors"}
    raw = {"base": "models", "experts": {"a": "org/a"}, "merge": "average", "tasks": {"a": {"test": test}}}

    for place in ("out", ".", "models-out"):
        assert parse_spec({**raw, "output": place}, tmp_path, "s").output.path == (tmp_path / place).resolve()
