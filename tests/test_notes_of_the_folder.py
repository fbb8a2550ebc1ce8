"""What a run found in its output folder, put back, tidied up or moved, is told in its report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tiny_models import PICTURE, SIZE, expert_of, pixels

from merging.pipeline import Pipeline
from merging.report.table import render


@pytest.fixture
def spec(tmp_path: Path) -> dict[str, Any]:
    for name, shift in {"base": 0.0, "a": 0.1, "b": 0.2}.items():
        (tmp_path / name).mkdir()
        tensors = {key: torch.ones(40, 30) + shift for key in ("first", "second")}
        save_file(tensors, tmp_path / name / "model.safetensors")
    experts = {name: str(tmp_path / name) for name in "ab"}
    return {"base": str(tmp_path / "base"), "experts": experts, "merge": "average", "device": "cpu"}


def left_over(out: Path) -> None:
    """As a run leaves it that was killed while it wrote a checkpoint."""
    folder = out / ".merged.partial-0123abcd"
    (folder / "content").mkdir(parents=True)
    (folder / "content" / "model.safetensors").write_bytes(b"half")
    (folder / "lock").touch()


def test_what_was_tidied_up_is_told_by_the_run_that_did_it(spec: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    left_over(tmp_path / "out")

    first = Pipeline.from_spec(spec).run(tmp_path / "out")
    again = Pipeline.from_spec(spec).run(tmp_path / "out")

    wanted = f"{tmp_path / 'out' / '.merged.partial-0123abcd'}: removed, left by a run that did not end"
    assert wanted in first.warnings
    assert "left by a run that did not end" in " ".join(render(first).split())
    assert list(again.warnings).count(wanted) == 1  # of the report that the first run left


@pytest.mark.parametrize("what", ["left over", "manifest gone"])
def test_a_run_that_finds_all_done_tells_it_too(spec: dict[str, Any], tmp_path: Path, what: str) -> None:
    out = tmp_path / "out"
    before = Pipeline.from_spec(spec).run(out)
    if what == "left over":
        left_over(out)
    else:
        (out / "merged" / "manifest.json").unlink()

    report = Pipeline.from_spec(spec).run(out)

    (new,) = set(report.warnings) - set(before.warnings)
    assert (
        "left by a run that did not end" if what == "left over" else "manifest was gone or damaged"
    ) in new


def test_a_replacement_that_was_cut_short_is_told(spec: dict[str, Any], tmp_path: Path) -> None:
    out = tmp_path / "out"
    Pipeline.from_spec(spec).run(out)
    folder = out / ".merged.partial-0123abcd"
    folder.mkdir()
    (folder / "lock").touch()
    (out / "merged").rename(folder / "old")

    report = Pipeline.from_spec(spec).run(out)

    assert f"{out / 'merged'}: put back what an earlier run had moved away" in report.warnings


def test_a_file_of_the_users_that_had_to_move_is_told(spec: dict[str, Any], tmp_path: Path) -> None:
    out = tmp_path / "out"
    Pipeline.from_spec(spec).run(out)
    (out / "merged" / "model-00001-of-00002.safetensors").write_bytes(b"mine")

    asked = {**spec, "output": {"shard_size": 5000}}
    report = Pipeline.from_spec(asked).run(out, overwrite=True)

    (note,) = [one for one in report.warnings if "its name was needed" in one]
    assert note.startswith("merged/model-00001-of-00002.safetensors: its name was needed, your file is now")
    moved = note.rpartition(" ")[2]
    assert (out / "merged" / moved).read_bytes() == b"mine"
    assert note in json.loads((out / "report.json").read_text())["warnings"]


def test_drift_puts_it_into_the_report_of_the_run(tmp_path: Path) -> None:
    from transformers import CLIPVisionConfig, CLIPVisionModel

    base = CLIPVisionModel(CLIPVisionConfig(**{**SIZE, "num_hidden_layers": 1}, **PICTURE)).eval()
    base.save_pretrained(tmp_path / "base")
    base.load_state_dict(expert_of(base, 1))
    base.save_pretrained(tmp_path / "digits")
    save_file(pixels(4), tmp_path / "digits.safetensors")
    data = {"calibration": {"type": "tensors", "path": str(tmp_path / "digits.safetensors")}}
    spec = {"base": str(tmp_path / "base"), "experts": {"digits": str(tmp_path / "digits")}, "device": "cpu"}
    pipeline = Pipeline.from_spec({**spec, "tasks": {"digits": data}, "merge": {"type": "average"}})
    pipeline.run(tmp_path / "out")
    left_over(tmp_path / "out")

    pipeline.drift(tmp_path / "out", frechet=False)

    warnings = json.loads((tmp_path / "out" / "report.json").read_text())["warnings"]
    assert len([one for one in warnings if "left by a run that did not end" in one]) == 1
