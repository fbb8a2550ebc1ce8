"""The clock may go backwards, and files may be dated later than now: nothing that is done relies on it."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from merging.checkpoints.hashing import FileHashes
from merging.pipeline import Pipeline
from merging.verifying import verify

LATER = 4_000_000_000  # seconds since 1970; in the year 2096
RULE = '''
import merging

@merging.strategy("{name}")
class Nth(merging.TensorMerger):
    """One of the experts."""
    def combine(self, name, base_S, deltas_NS):
        return base_S + deltas_NS[{number}]
'''


def date(folder: Path, seconds: int) -> None:
    for file in [folder, *folder.rglob("*")]:
        os.utime(file, (seconds, seconds))


@pytest.fixture
def spec(tmp_path: Path) -> Path:
    for number, name in enumerate(("base", "a", "b")):
        (tmp_path / name).mkdir()
        save_file({"weight": torch.full((3, 2), float(number))}, tmp_path / name / "model.safetensors")
    path = tmp_path / "spec.json"
    given = {"base": "base", "experts": {"a": "a", "b": "b"}, "merge": {"type": "average"}, "device": "cpu"}
    path.write_text(json.dumps(given))
    return path


def test_a_folder_that_is_dated_later_is_gone_on_with(spec: Path) -> None:
    out = spec.parent / "out"
    Pipeline.from_spec(spec).run(out)
    made = (out / "merged" / "model.safetensors").stat().st_ino
    date(spec.parent, LATER)

    Pipeline.from_spec(spec).run(out)

    assert (out / "merged" / "model.safetensors").stat().st_ino == made
    assert verify(out).unchanged


def test_an_input_that_changed_with_an_earlier_date_is_noticed(spec: Path) -> None:
    out, expert = spec.parent / "out", spec.parent / "a" / "model.safetensors"
    date(spec.parent, LATER)
    Pipeline.from_spec(spec).run(out)
    save_file({"weight": torch.full((3, 2), 9.0)}, expert)
    os.utime(expert, (1000, 1000))

    Pipeline.from_spec(spec).run(out)

    assert torch.equal(load_file(out / "merged" / "model.safetensors")["weight"], torch.full((3, 2), 5.5))


def test_a_hash_is_not_remembered_of_a_file_from_the_future(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"1")
    os.utime(file, (LATER, LATER))
    known = FileHashes(tmp_path / "hashes.json")

    known.of(file)

    assert known.recalled(file) is None


def test_a_plug_in_of_the_same_date_and_size_is_read_anew(spec: Path) -> None:
    rules, found = spec.parent / "rules.py", []
    for number in (0, 1):
        rules.write_text(RULE.format(name=f"nth_{number}", number=number))
        os.utime(rules, (1000, 1000))
        sets = ['plugins=["rules.py"]', f"merge.type=nth_{number}"]
        Pipeline.from_spec(spec, sets=sets).run(spec.parent / f"out{number}")
        found.append(load_file(spec.parent / f"out{number}" / "merged" / "model.safetensors")["weight"][0, 0])

    assert found == [1.0, 2.0]
    assert not (spec.parent / "__pycache__").exists()
