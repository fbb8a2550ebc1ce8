"""A spec that comes out of a pipe has no folder and no name: what that means for its paths and its output."""

from __future__ import annotations

import json
import os
import shutil
import threading
from pathlib import Path

import pytest

import merging.working_folder as of_folders
from merging.errors import OutputError, SpecError
from merging.pipeline import Pipeline
from merging.spec import load_spec

SPEC = {"base": "./base", "experts": {"a": "org/a"}, "merge": "average"}


def piped(place: Path, **changes: object) -> Path:
    """A pipe with a spec in it."""
    os.mkfifo(place)
    text = json.dumps({**SPEC, **changes})
    threading.Thread(target=place.write_text, args=(text,), daemon=True).start()
    return place


@pytest.fixture
def here(tmp_path, monkeypatch):
    (tmp_path / "work" / "base").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path / "work"


def test_paths_start_at_the_working_folder_and_there_is_no_output(here, tmp_path):
    spec = load_spec(piped(tmp_path / "pipe"))

    assert spec.base.model == str(here / "base")
    assert spec.output.path is None
    with pytest.raises(OutputError, match="no output folder is given"):
        Pipeline.from_spec(spec).run()


def test_an_output_that_it_gives_is_there_too(here, tmp_path):
    assert load_spec(piped(tmp_path / "pipe", output="out")).output.path == here / "out"


def test_a_file_behind_standard_input_is_none_either(here, tmp_path):
    (tmp_path / "spec.json").write_text(json.dumps(SPEC))
    with (tmp_path / "spec.json").open("rb") as file:
        spec = load_spec(Path(f"/dev/fd/{file.fileno()}"))

    assert spec.base.model == str(here / "base")
    assert spec.output.path is None


def test_a_file_is_what_it_was(here, tmp_path):
    (here / "spec.json").write_text(json.dumps(SPEC))

    assert load_spec(Path("spec.json")).output.path == here / "spec-out"


def test_infinity_is_told_with_its_place(here):
    (here / "spec.json").write_text('{"merge": {"type": "ties", "scale": Infinity}}')

    with pytest.raises(SpecError, match=r"merge\.scale: found Infinity, expected a finite number"):
        load_spec(Path("spec.json"))


def test_a_working_folder_that_is_gone_matters_to_relative_paths_alone(here, tmp_path, monkeypatch):
    (tmp_path / "base").mkdir()
    (tmp_path / "spec.json").write_text(json.dumps({**SPEC, "base": str(tmp_path / "base")}))
    monkeypatch.setattr(of_folders, "_left", False)
    shutil.rmtree(here)

    of_folders.leave_if_gone()

    assert load_spec(tmp_path / "spec.json").output.path == tmp_path / "spec-out"
    assert of_folders.working_folder(needed=False) == Path("/")
    with pytest.raises(SpecError, match="the working folder is gone"):
        load_spec(Path("spec.json"))
