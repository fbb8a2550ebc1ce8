"""Scores: what people report, and what they see here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from small_models import clip_tower, expert, rewritten, saved, spec_of, tensors_in
from transformers import CLIPVisionModel

from merging.errors import DataError
from merging.pipeline import Pipeline
from merging.report.report import Report
from merging.report.scores import AVERAGING

TASKS = ("digits", "letters", "signs")


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Labels are what each expert says, but for one example in ten: its score is known beforehand."""
    folder, base = tmp_path_factory.mktemp("workshop"), clip_tower()
    saved(base, folder / "base")
    for seed, task in enumerate(TASKS, start=1):
        model = expert(base, seed, noise=0.05)
        saved(model, folder / task)
        generator = torch.Generator().manual_seed(seed)
        images = torch.randn(50, 3, 32, 32, generator=generator)
        weight = torch.randn(5, 32, generator=generator)
        with torch.no_grad():
            features = model(pixel_values=images).pooler_output
        bias = -(features @ weight.T).mean(0)
        labels = (features @ weight.T + bias).argmax(1)
        labels[::10] = (labels[::10] + 1) % 5
        save_file({"pixel_values": images, "labels": labels}, folder / f"{task}-test.safetensors")
        save_file({"weight": weight, "bias": bias}, folder / f"{task}-head.safetensors")
    return folder


def spec(workshop: Path, **changes: Any) -> dict[str, Any]:
    tasks = {
        task: {
            "test": {"type": "tensors", "path": str(workshop / f"{task}-test.safetensors")},
            "head": {"type": "linear", "path": str(workshop / f"{task}-head.safetensors")},
        }
        for task in TASKS
    }
    experts = {task: workshop / task for task in TASKS}
    return spec_of(workshop / "base", experts, {"type": "average"}, **{"tasks": tasks, **changes})


@pytest.fixture(scope="module")
def report(workshop: Path, tmp_path_factory: pytest.TempPathFactory) -> Report:
    return Pipeline.from_spec(spec(workshop)).run(tmp_path_factory.mktemp("run") / "out")


def test_raw_and_normalised_scores_stand_side_by_side_and_the_report_says_how_it_averages(
    report: Report,
) -> None:
    for task in report.tasks.values():
        scores, ratios = task.scores, task.normalised
        assert None not in (scores.base, scores.expert, scores.merged)
        assert ratios.merged == pytest.approx(scores.merged / scores.expert)
    merged = [task.scores.merged for task in report.tasks.values()]
    ratios = [task.normalised.merged for task in report.tasks.values()]
    assert report.means.scores.merged == pytest.approx(sum(merged) / 3)
    assert report.means.normalised.merged == pytest.approx(sum(ratios) / 3)
    assert report.means.averaging == AVERAGING
    assert "per task first" in AVERAGING


def test_the_experts_known_score_is_reproduced_with_its_own_head(report: Report) -> None:
    for task in report.tasks.values():
        assert task.scores.expert == pytest.approx(0.9)
        assert task.test_examples == 50
        assert task.fingerprints["test"]


def test_all_models_are_scored_with_one_head_and_in_one_precision(workshop: Path, tmp_path: Path) -> None:
    """Experts in bfloat16 beside a base in float32: the same head and float32 for all."""
    saved(clip_tower(), tmp_path / "base")
    halves = clip_tower().to(torch.bfloat16)
    saved(halves, tmp_path / "half")
    saved(halves.float(), tmp_path / "wide")
    tasks = {
        name: {
            "test": {"type": "tensors", "path": str(workshop / "digits-test.safetensors")},
            "head": {"type": "linear", "path": str(workshop / "digits-head.safetensors")},
        }
        for name in ("half", "wide")
    }
    experts = {name: tmp_path / name for name in tasks}

    found = Pipeline.from_spec(spec_of(tmp_path / "base", experts, {"type": "average"}, tasks=tasks)).run(
        tmp_path / "out"
    )

    assert found.tasks["half"].scores == found.tasks["wide"].scores
    manifest = json.loads((tmp_path / "out" / "merged" / "manifest.json").read_text())
    assert manifest["notes"]["heads"]["half"]["weight"] == [5, 32]


def test_test_examples_that_are_calibration_examples_are_counted_by_content(
    workshop: Path, tmp_path: Path
) -> None:
    generator = torch.Generator().manual_seed(99)
    test = torch.randn(256, 3, 32, 32, generator=generator)
    calibration = torch.cat([torch.randn(20, 3, 32, 32, generator=generator), test[:10]])
    save_file({"pixel_values": calibration}, tmp_path / "calibration.safetensors")
    labels = torch.randint(0, 5, (256,), generator=generator)
    save_file({"pixel_values": test, "labels": labels}, tmp_path / "test.safetensors")
    tasks = spec(workshop)["tasks"]
    for task in TASKS:
        tasks[task]["calibration"] = {"type": "tensors", "path": str(tmp_path / "calibration.safetensors")}
    tasks["digits"]["test"]["path"] = str(tmp_path / "test.safetensors")

    with pytest.raises(
        DataError, match=r"tasks\.digits: 10 of 256 test examples are calibration examples too"
    ):
        Pipeline.from_spec(spec(workshop, tasks=tasks)).run(tmp_path / "out")
    assert not (tmp_path / "out").exists()
    found = Pipeline.from_spec(spec(workshop, tasks=tasks, allow=["overlap"])).run(tmp_path / "out")

    assert found.tasks["digits"].overlap == 10
    assert found.tasks["letters"].overlap == 0
    assert any('task "digits": 10 of 256 test examples' in warning for warning in found.warnings)


def _as_the_base_says(workshop: Path, task: str, folder: Path) -> Path:
    """The task's test with labels at which the base is always right."""
    images = load_file(workshop / f"{task}-test.safetensors")["pixel_values"]
    head = load_file(workshop / f"{task}-head.safetensors")
    base = CLIPVisionModel.from_pretrained(workshop / "base").eval()
    with torch.no_grad():
        labels = (base(pixel_values=images).pooler_output @ head["weight"].T + head["bias"]).argmax(1)
    save_file({"pixel_values": images, "labels": labels}, folder / "test.safetensors")
    return folder / "test.safetensors"


def test_an_expert_that_was_bad_before_merging_is_pointed_at(workshop: Path, tmp_path: Path) -> None:
    import shutil

    broken = tmp_path / "letters"
    shutil.copytree(workshop / "letters", broken)
    tensors = tensors_in(broken)
    order = torch.randperm(64, generator=torch.Generator().manual_seed(0))
    for layer in (0, 1):
        for leaf in ("weight", "bias"):
            name = f"encoder.layers.{layer}.mlp.fc1.{leaf}"
            tensors[name] = tensors[name][order]  # rows no longer belong to the columns of fc2
        tensors[f"encoder.layers.{layer}.mlp.fc2.weight"] *= 20
    rewritten(broken, tensors)
    with_broken = spec(workshop)
    with_broken["experts"]["letters"] = str(broken)
    with_broken["tasks"]["letters"]["test"]["path"] = str(_as_the_base_says(workshop, "letters", tmp_path))

    found = Pipeline.from_spec(with_broken).run(tmp_path / "out")

    scores = found.tasks["letters"].scores
    assert None not in (scores.base, scores.expert, scores.merged)
    assert scores.base == 1
    assert scores.expert < 0.6
    pointed = [warning for warning in found.warnings if "it was bad before merging" in warning]
    assert len(pointed) == 1
    assert 'expert "letters"' in pointed[0]
