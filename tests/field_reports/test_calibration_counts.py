"""How much data a calibration really used: what people report, and what they see here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from small_models import WORDS, clip_tower, expert, llama, saved, spec_of, tensors_in, write_words
from tiny_models import made

from merging.errors import DataError, MergingError
from merging.fates import unsolved
from merging.pipeline import Pipeline
from merging.report.report import Report
from merging.strategies.regmean import RegMean

TASKS = ("one", "two", "three")
FEATCAL = {"calibrate": {"type": "featcal"}, "merge": {"type": "average"}}


@pytest.fixture(scope="module")
def towers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, base = tmp_path_factory.mktemp("towers"), clip_tower()
    saved(base, folder / "base")
    for seed, name in enumerate(TASKS, start=1):
        saved(expert(base, seed), folder / name)
    return folder


def pictures(place: Path, count: int, *, same: bool = False) -> dict[str, Any]:
    one = torch.randn(1 if same else count, 3, 32, 32, generator=torch.Generator().manual_seed(count))
    save_file({"pixel_values": one.expand(count, -1, -1, -1).contiguous()}, place)
    return {"type": "tensors", "path": str(place)}


def spec(towers: Path, examples: dict[str, dict[str, Any]], **changes: Any) -> dict[str, Any]:
    tasks = {task: {"calibration": given} for task, given in examples.items()}
    return spec_of(
        towers / "base", {task: towers / task for task in TASKS}, tasks=tasks, **{**FEATCAL, **changes}
    )


def test_fewer_examples_than_asked_for_are_counted_in_report_manifest_and_a_warning(
    towers: Path, tmp_path: Path
) -> None:
    given = {task: pictures(tmp_path / task, count) for task, count in zip(TASKS, (40, 12, 20), strict=True)}
    given["one"]["examples"] = 256
    given["two"]["examples"] = 8

    report = Pipeline.from_spec(spec(towers, given)).run(tmp_path / "out")

    assert [report.tasks[task].calibration_used for task in TASKS] == [40, 8, 20]
    assert [report.tasks[task].calibration_asked for task in TASKS] == [256, 8, None]
    assert any("256 examples asked for, 40 used" in warning for warning in report.warnings)
    manifest = json.loads((Path(report.checkpoint) / "manifest.json").read_text())
    assert [manifest["calibration"][task]["used"] for task in TASKS] == [40, 8, 20]


def test_identical_examples_are_warned_of_with_the_rank_that_they_leave(towers: Path, tmp_path: Path) -> None:
    given = {task: pictures(tmp_path / task, 8, same=True) for task in TASKS}

    rule = {"type": "regmean", "shrink": 1.0}
    report = Pipeline.from_spec(spec(towers, given, calibrate=[], merge=rule)).run(tmp_path / "out")

    assert any("7 of 8 examples repeat another one" in warning for warning in report.warnings)
    assert any("solves are ill-conditioned" in warning for warning in report.warnings)
    assert any("solves fell back" in warning for warning in report.warnings)


def test_a_task_without_examples_is_named_before_any_work(towers: Path, tmp_path: Path) -> None:
    given = {task: pictures(tmp_path / task, 4) for task in TASKS[:2]}

    with pytest.raises(MergingError) as caught:
        Pipeline.from_spec(spec(towers, given)).run(tmp_path / "out")

    assert "tasks.three.calibration" in str(caught.value)
    assert caught.value.exit_code == 2
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("text", "words"),
    [("", ["texts.jsonl"]), ('{"title": "w3 w4"}\n', ["texts.jsonl", "text"])],
    ids=["empty file", "missing column"],
)
def test_an_empty_file_and_a_missing_column_are_errors_with_task_and_file(
    tmp_path: Path, text: str, words: list[str]
) -> None:
    for seed, name in enumerate(("base", "one")):
        saved(expert(llama(), seed), tmp_path / name)
        write_words(tmp_path / name, WORDS)
    (tmp_path / "texts.jsonl").write_text(text)
    data = {"calibration": {"type": "text", "path": str(tmp_path / "texts.jsonl"), "input": "text"}}

    with pytest.raises(DataError) as caught:
        Pipeline.from_spec(
            spec_of(tmp_path / "base", {"one": tmp_path / "one"}, {"type": "regmean"}, tasks={"one": data})
        ).validate()

    for word in (*words, "one"):
        assert word in str(caught.value)


def of_a_run(towers: Path, out: Path, given: dict[str, dict[str, Any]]) -> Report:
    return Pipeline.from_spec(spec(towers, given)).run(out)


def test_each_parameter_of_a_tower_is_in_the_report_once_with_what_became_of_it(
    towers: Path, tmp_path: Path
) -> None:
    """Those outside of the repeated layers too."""
    given = {task: pictures(tmp_path / task, 12) for task in TASKS}

    report = of_a_run(towers, tmp_path / "out", given)

    assert report.parameters.keys() == tensors_in(towers / "base").keys()
    for norm in ("pre_layrnorm", "post_layernorm"):
        fate = report.parameters[f"{norm}.weight"]
        assert (fate.state, fate.reason) in (("solved", ""), ("merged", "outside the blocks"))
    assert all(fate.reason for fate in report.parameters.values() if fate.state != "solved")


@pytest.mark.parametrize("name", ["t5", "clip_projection"])
def test_final_norms_and_projections_have_a_fate_too(name: str) -> None:
    backbone, model, _ = made(name)

    reasons = unsolved(RegMean(), model, backbone.stacks(model))

    assert reasons.keys() >= {path for path, _ in model.named_parameters(remove_duplicate=False)}
    outside = {path for path, reason in reasons.items() if reason == "outside the blocks"}
    wanted = {"t5": "encoder.final_layer_norm.weight", "clip_projection": "visual_projection.weight"}
    assert wanted[name] in outside
