"""What is found before the work: all in one answer, the gravest first, each with a name and a remedy."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_requests import suite
from tiny_models import made

import merging.room as room
from merging.errors import DataError, MergingError, OutputError
from merging.pipeline import Pipeline


class Usage(NamedTuple):
    free: int


def plain(folder: Path, **noises: float) -> dict[str, Any]:
    """A spec of plain tensors; experts by how far they are from the base, relative to it."""
    generator = torch.Generator().manual_seed(0)
    base = torch.randn(40, 30, generator=generator)
    for name, noise in {"base": 0.0, **noises}.items():
        (folder / name).mkdir()
        expert = base + noise * torch.randn(40, 30, generator=generator)
        save_file({"weight": expert}, folder / name / "model.safetensors")
    return {
        "base": str(folder / "base"),
        "experts": {name: str(folder / name) for name in noises},
        "merge": {"type": "average"},
        "device": "cpu",
        "output": {"path": str(folder / "out")},
    }


def notes(spec: Mapping[str, Any]) -> str:
    return "\n".join(Pipeline.from_spec(dict(spec)).validate())


def refused(spec: Mapping[str, Any]) -> MergingError:
    with pytest.raises(MergingError) as caught:
        Pipeline.from_spec(dict(spec)).run()
    return caught.value


def test_an_expert_far_from_the_base_is_warned_of_by_name(tmp_path: Path) -> None:
    spec = plain(tmp_path, near=0.03, far=0.8)

    found = notes(spec)

    assert 'expert "far": its matrices differ from the base\'s by 0.7' in found
    assert "[far_from_base]" in found
    assert "merging compare" in found
    assert '"near"' not in found
    report = Pipeline.from_spec(spec).run()
    assert any("[far_from_base]" in warning for warning in report.warnings)


def test_a_warning_that_is_allowed_is_not_given(tmp_path: Path) -> None:
    assert notes({**plain(tmp_path, far=0.8), "allow": ["far_from_base"]}).count("[far") == 0


def test_the_plan_says_how_far_each_expert_is(tmp_path: Path) -> None:
    plan = Pipeline.from_spec(plain(tmp_path, near=0.03, far=0.8)).plan()

    near, far = (plan.experts[name] for name in ("near", "far"))
    assert near.distance == pytest.approx(0.03, rel=0.1)
    assert far.distance == pytest.approx(0.8, rel=0.1)
    assert near.cosine == pytest.approx(1.0, abs=0.01)
    assert far.cosine == pytest.approx(1 / (1 + 0.8**2) ** 0.5, abs=0.05)


def test_another_base_stops_and_comes_before_what_only_warns(tmp_path: Path) -> None:
    error = refused(plain(tmp_path, far=0.8, foreign=50.0))

    assert [(one.name, one.gravity) for one in error.problems] == [
        ("other_base", "error"),
        ("far_from_base", "warning"),
    ]
    assert all(one.remedy for one in error.problems)
    assert '"allow": ["other_base"]' in str(error)
    assert error.exit_code == 2
    assert not (tmp_path / "out").exists()


def test_an_expert_of_nothing_but_zeros_stops_and_may_be_allowed(tmp_path: Path) -> None:
    spec = plain(tmp_path, near=0.03, blank=0.0)
    save_file({"weight": torch.zeros(40, 30)}, tmp_path / "blank" / "model.safetensors")

    error = refused(spec)

    assert [one.name for one in error.problems] == ["other_base"]
    assert 'expert "blank": its matrices hold nothing but zeros' in str(error)
    assert 'allowed: expert "blank"' in notes({**spec, "allow": ["other_base"]})


def test_a_matrix_of_zeros_among_others_stops_by_its_name(tmp_path: Path) -> None:
    spec = plain(tmp_path, near=0.03, cut=0.03)
    for role in ("base", "near", "cut"):  # a download whose last part was never filled
        file = tmp_path / role / "model.safetensors"
        last = torch.zeros(4, 5) if role == "cut" else torch.ones(4, 5)
        save_file({**load_file(file), "last": last, "never": torch.zeros(4, 5)}, file)

    error = refused(spec)

    assert [one.name for one in error.problems] == ["other_base"]
    assert 'expert "cut": 1 of its matrices hold nothing but zeros' in str(error)
    assert ": last; a download" in str(error)
    assert 'allowed: expert "cut"' in notes({**spec, "allow": ["other_base"]})


@pytest.mark.parametrize("kind", ["none", "dead link", "file of weights"])
def test_an_expert_without_a_config_is_told_of_where_the_base_has_one(tmp_path: Path, kind: str) -> None:
    spec = plain(tmp_path, near=0.03)
    (tmp_path / "base" / "config.json").write_text('{"hidden_size": 30}')
    config, weights = (tmp_path / "near" / name for name in ("config.json", "model.safetensors"))
    if kind == "dead link":
        config.symlink_to("gone")
    experts = {"near": str(weights)} if kind == "file of weights" else spec["experts"]

    first, again = (notes({**spec, "experts": experts}) for _ in range(2))

    words = {
        "none": f'expert "near": {config.parent} has no config.json',
        "dead link": f'expert "near": its {config} is a link that leads nowhere',
        "file of weights": "",
    }[kind]
    assert ("could not be compared" in first) == bool(words)
    assert words in first
    assert first == again


def test_a_full_disk_is_told_before_the_work_and_may_be_allowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = plain(tmp_path, near=0.03)
    monkeypatch.setattr(room.shutil, "disk_usage", lambda path: Usage(1000))

    error = refused(spec)

    assert isinstance(error, OutputError)
    assert "merged will take 4.8 kB, its disk has 1.0 kB free" in str(error)
    assert '"allow": ["disk"]' in str(error)
    assert not (tmp_path / "out").exists()
    assert "allowed: " in notes({**spec, "allow": ["disk"]})


def test_what_is_finished_needs_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = plain(tmp_path, near=0.03)
    first = Pipeline.from_spec(spec).run()
    monkeypatch.setattr(room.shutil, "disk_usage", lambda path: Usage(1000))

    assert Pipeline.from_spec(spec).run() == first


@pytest.mark.parametrize(
    ("total", "available", "stops"), [(1 << 20, 1 << 20, True), (1 << 45, 1 << 20, False)]
)
def test_want_of_memory_stops_where_the_machine_has_too_little_and_warns_where_others_use_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, total: int, available: int, stops: bool
) -> None:
    spec = plain(tmp_path, near=0.03)
    monkeypatch.setattr(room, "machine_memory", lambda: (total, available))

    if stops:
        error = refused(spec)
        assert '"allow": ["memory"]' in str(error)
        assert 'Set "memory"' in str(error)
        spec["allow"] = ["memory"]
    assert "merge (average): needs about" in notes(spec)


def test_all_kinds_of_things_that_stop_a_run_come_in_one_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = plain(tmp_path, foreign=50.0)
    spec["device"] = "cuda:7" if not torch.cuda.is_available() else "mps"
    monkeypatch.setattr(room.shutil, "disk_usage", lambda path: Usage(1000))

    error = refused(spec)

    text = str(error)
    assert "cannot be used here" in text
    assert "[other_base]" in text
    assert "[disk]" in text


def test_shapes_that_do_not_fit_are_told_with_the_config_that_explains_them(tmp_path: Path) -> None:
    _, model, batches = made("llama")
    spec = suite(tmp_path, model, batches[0], calibrate=[])
    file = tmp_path / "one" / "config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps({**config, "num_attention_heads": 2}))
    weights = tmp_path / "one" / "model.safetensors"
    tensors = load_file(weights)
    tensors["model.norm.weight"] = torch.zeros(7)
    save_file(tensors, weights, {"format": "pt"})

    text = str(refused({**spec, "output": {"path": str(tmp_path / "out")}}))

    assert "model.norm.weight" in text
    assert "num_attention_heads 2, the base has 4" in text
    assert "[config]" in text


def test_test_examples_that_are_calibrated_on_are_found_by_content(tmp_path: Path) -> None:
    _, model, batches = made("vit_classifier")
    spec = suite(tmp_path, model, batches[0])
    pixels = batches[0]["pixel_values"]
    labelled = {"pixel_values": torch.cat([pixels[:2], pixels[:2] + 1]), "labels": torch.tensor([0, 1, 2, 3])}
    save_file(labelled, tmp_path / "test.safetensors")
    spec["tasks"]["one"]["test"] = {"type": "tensors", "path": str(tmp_path / "test.safetensors")}

    error = refused({**spec, "output": {"path": str(tmp_path / "out")}})

    assert isinstance(error, DataError)
    assert "tasks.one: 2 of 4 test examples are calibration examples too" in str(error)
    assert '"allow": ["overlap"]' in str(error)
    assert "few_examples" not in str(error)
    assert not (tmp_path / "out").exists()
    assert "allowed: tasks.one: 2 of 4" in notes({**spec, "allow": ["overlap"]})


def test_too_few_tokens_for_the_widest_layer_are_told_with_how_many_would_do(tmp_path: Path) -> None:
    _, model, batches = made("vit_classifier")
    spec = suite(tmp_path, model, {"pixel_values": batches[0]["pixel_values"][:1]})

    found = notes(spec)

    assert "the 2 calibration examples of all tasks have 34 tokens at most, for up to 64 features" in found
    assert "[few_examples]. Use 4 examples or more, over all tasks." in found


def test_a_search_is_refused_too_before_any_point_is_tried(tmp_path: Path) -> None:
    _, model, batches = made("llama")
    spec = suite(tmp_path, model, batches[0], calibrate=[], merge={"type": "task_arithmetic"})
    file = tmp_path / "one" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "num_attention_heads": 2}))

    with pytest.raises(MergingError, match=r"num_attention_heads 2, the base has 4"):
        Pipeline.from_spec(spec).search({"merge.scale": [0.1, 0.2]})
