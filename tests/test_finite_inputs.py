"""NaN and infinity in the weights are told before the run, with everything else that is wrong."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from merging_cli.main import main
from safetensors.torch import load_file, save_file
from test_preflight_answers import plain, refused
from test_requests import suite
from tiny_models import made

from merging.checkpoints import finite_files, hashing
from merging.errors import CheckpointError
from merging.pipeline import Pipeline

NAN = float("nan")


def spoil(file: Path, name: str, *, times: int = 1, value: float = NAN) -> None:
    tensors = load_file(file)
    tensors[name].view(-1)[:times] = value
    save_file(tensors, file, {"format": "pt"})


def weights_of(spec: Mapping[str, Any], expert: str) -> Path:
    return Path(spec["experts"][expert]) / "model.safetensors"


def listed(folder: Path) -> list[str]:
    return sorted(str(path) for path in folder.rglob("*"))


def test_a_run_is_refused_before_anything_is_written_in_one_answer_with_the_rest(tmp_path: Path) -> None:
    spec = plain(tmp_path, near=0.03, spoilt=0.03, foreign=50.0)
    spoil(weights_of(spec, "spoilt"), "weight", times=3)
    spoil(weights_of(spec, "near"), "weight", times=2, value=float("-inf"))
    before = listed(tmp_path)

    error = refused(spec)

    text = str(error)
    assert 'expert "spoilt": weight: 3 values are NaN or infinite' in text
    assert 'expert "near": weight: 2 values are NaN or infinite' in text
    assert "[other_base]" in text
    assert "get them again" in text
    assert error.exit_code == 2
    assert listed(tmp_path) == before


def test_no_name_in_allow_lets_it_through(tmp_path: Path) -> None:
    spec = plain(tmp_path, spoilt=0.03)
    spoil(weights_of(spec, "spoilt"), "weight")
    every = ["config", "other_base", "disk", "memory", "far_from_base", "few_examples", "overlap"]

    assert "1 values are NaN" in str(refused({**spec, "allow": every}))


def test_a_bad_base_is_told_as_the_base(tmp_path: Path) -> None:
    spec = plain(tmp_path, near=0.03)
    spoil(tmp_path / "base" / "model.safetensors", "weight", times=5)

    error = refused(spec)

    assert [one.where for one in error.problems] == ["base: weight"]


def test_plan_and_validate_read_all_weights_where_asked_and_tell_afterwards_what_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hashing, "_FRESH", -1e9)
    spec = plain(tmp_path, spoilt=0.03)
    spoil(weights_of(spec, "spoilt"), "weight")
    Pipeline.from_spec(spec).validate()
    Pipeline.from_spec(spec).plan()

    for asked in (Pipeline.from_spec(spec).validate, Pipeline.from_spec(spec).plan):
        with pytest.raises(CheckpointError, match="1 values are NaN or infinite"):
            asked(read_weights=True)
    monkeypatch.setattr(finite_files, "_hashed_and_counted", lambda file: pytest.fail("it is read again"))
    for asked in (
        Pipeline.from_spec(spec).validate,
        Pipeline.from_spec(spec).plan,
        Pipeline.from_spec(spec).run,
    ):
        with pytest.raises(CheckpointError, match="1 values are NaN or infinite"):
            asked()


def test_the_command_reads_all_weights_where_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = plain(tmp_path, spoilt=0.03)
    spoil(weights_of(spec, "spoilt"), "weight")
    (tmp_path / "spec.json").write_text(json.dumps(spec))

    assert main(["pipeline", "validate", str(tmp_path / "spec.json")]) == 0
    assert main(["pipeline", "validate", str(tmp_path / "spec.json"), "--read-weights"]) == 2
    said = capsys.readouterr().err
    assert "read weights" in said
    assert 'expert "spoilt": weight: 1 values are NaN or infinite' in said


def test_each_file_is_read_once_for_its_hash_and_its_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hashing, "_FRESH", -1e9)
    spec = plain(tmp_path, one=0.03, two=0.02)
    read, hashed = [], []
    together, alone = finite_files._hashed_and_counted, hashing._digest
    monkeypatch.setattr(
        finite_files, "_hashed_and_counted", lambda file: (read.append(file), together(file))[1]
    )
    monkeypatch.setattr(hashing, "_digest", lambda file: (hashed.append(file), alone(file))[1])

    Pipeline.from_spec(spec).run()

    assert sorted(file.parent.name for file in read) == ["base", "one", "two"]
    assert not [file for file in hashed if file in read]


def test_a_tensor_that_is_left_out_may_hold_anything_unless_models_are_run(tmp_path: Path) -> None:
    _, model, batches = made("llama")
    spec = suite(tmp_path, model, batches[0], calibrate=[])
    spoil(weights_of(spec, "one"), "model.norm.weight")
    merge = {"type": "task_arithmetic", "layers": [{"match": "*norm*", "leave_out": True}]}

    report = Pipeline.from_spec({**spec, "merge": merge, "tasks": {}}).run(tmp_path / "out")

    assert all(
        torch.isfinite(one).all() for one in load_file(f"{report.checkpoint}/model.safetensors").values()
    )
    assert 'expert "one": model.norm.weight: 1 values' in str(refused({**spec, "merge": merge}))


def test_pickled_experts_are_looked_at_too(tmp_path: Path) -> None:
    spec = plain(tmp_path, spoilt=0.03)
    file = weights_of(spec, "spoilt")
    tensors = load_file(file)
    tensors["weight"][1, 1] = NAN
    file.unlink()
    torch.save(tensors, file.with_name("pytorch_model.bin"))

    assert 'expert "spoilt": weight: 1 values are NaN' in str(refused(spec))


def test_values_of_tensors_that_the_run_does_not_use_are_no_matter(tmp_path: Path) -> None:
    """A head of a task that nobody scores."""
    _, model, batches = made("vit_classifier")
    spec = suite(tmp_path, model, batches[0], calibrate=[], tasks={})
    spoil(weights_of(spec, "one"), "classifier.weight")

    Pipeline.from_spec(spec).run(tmp_path / "out")


def test_a_head_that_scores_a_task_is_looked_at(tmp_path: Path) -> None:
    _, model, batches = made("vit_classifier")
    spec = suite(tmp_path, model, batches[0], calibrate=[])
    spoil(weights_of(spec, "one"), "classifier.weight", times=4)

    error = refused({**spec, "output": {"path": str(tmp_path / "out")}})

    assert 'expert "one": classifier.weight: 4 values' in str(error)
    assert not (tmp_path / "out").exists()


def test_a_model_merged_elsewhere_is_looked_at(tmp_path: Path) -> None:
    spec = plain(tmp_path, merged=0.03)
    spoil(weights_of(spec, "merged"), "weight")
    model = spec["experts"].pop("merged")

    error = refused({**spec, "merge": {"type": "checkpoint", "model": model}})

    assert [one.where for one in error.problems] == ["merged model: weight"]
