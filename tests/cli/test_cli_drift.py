"""`merging drift` on a real small run, and what a run says where calibrating harms."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file
from tiny_models import PICTURE, SIZE, expert_of, pixels

from merging.pipeline import Pipeline
from merging.report.report import Report

TASKS = ("digits", "letters")
HARMFUL = {"type": "featcal", "ridge": 1e-6}
"""On one picture a task, far fewer tokens than features, with next to nothing that holds it back."""


@pytest.fixture(scope="module")
def workshop(tmp_path_factory):
    from transformers import CLIPVisionConfig, CLIPVisionModel

    folder = tmp_path_factory.mktemp("workshop")
    torch.manual_seed(0)
    base = CLIPVisionModel(CLIPVisionConfig(**{**SIZE, "num_hidden_layers": 2}, **PICTURE)).eval()
    base.save_pretrained(folder / "base")
    for seed, task in enumerate(TASKS, start=1):
        expert = CLIPVisionModel(base.config).eval()
        expert.load_state_dict(expert_of(base, seed))
        expert.save_pretrained(folder / task)
        save_file(pixels(40, seed=seed), folder / f"{task}.safetensors")
    return folder


@pytest.fixture
def spec_at(workshop, tmp_path):
    """Writes a spec into a folder of its own; its path."""

    def write(examples, calibrate, **changes):
        data = {"type": "tensors", "examples": examples}
        spec = {
            "base": str(workshop / "base"),
            "experts": {task: str(workshop / task) for task in TASKS},
            "merge": {"type": "task_arithmetic", "scale": 0.05},
            "tasks": {
                task: {"calibration": {**data, "path": str(workshop / f"{task}.safetensors")}}
                for task in TASKS
            },
            "output": {"path": "out"},
            "device": "cpu",
            **changes,
        }
        if calibrate is not None:
            spec["calibrate"] = calibrate
        (tmp_path / "spec.json").write_text(json.dumps(spec))
        return tmp_path / "spec.json"

    return write


def test_a_calibration_that_harms_is_told_in_report_summary_and_model_card(spec_at, merging_command):
    spec = spec_at(1, HARMFUL)

    answer = merging_command("pipeline", "run", spec, "--quiet")

    out = spec.parent / "out"
    report = Report.read(out / "report.json")
    (warning,) = [one for one in report.warnings if "away from the expert" in one]
    assert "moved all of them away from the expert" in warning
    assert all(f'"{task}"' in warning for task in TASKS)
    assert "of 8 calibration examples that were not drawn" in warning
    assert "warning: calibrating moved all of them away" in " ".join(answer.out.split())
    card = (out / "calibrated" / "README.md").read_text()
    assert card.count("## Beware: drift") == 1
    assert "Use more calibration examples" in card
    assert "Beware: drift" not in (out / "merged" / "README.md").read_text()
    assert merging_command("pipeline", "run", spec).out == answer.out  # nothing is made again
    assert [stage.name for stage in Report.read(out / "report.json").stages] == [
        stage.name for stage in report.stages
    ]


def test_a_calibration_that_helps_is_not_warned_of(spec_at, merging_command):
    spec = spec_at(24, {"type": "featcal"})

    answer = merging_command("pipeline", "run", spec, "--quiet")

    assert answer.code == 0
    assert "away from the expert" not in answer.out
    assert "Beware: drift" not in (spec.parent / "out" / "calibrated" / "README.md").read_text()
    drift = Report.read(spec.parent / "out" / "report.json").drift
    assert all(row.calibrated.distance < row.merged.distance for row in drift.output.values())


def test_drift_runs_what_is_missing_and_prints_and_draws(spec_at, merging_command):
    spec = spec_at(24, {"type": "featcal"})
    plot = spec.parent / "plots" / "drift.svg"

    answer = merging_command("drift", spec, "--plot", plot, "--quiet")

    assert answer.code == 0
    lines = answer.out.splitlines()
    assert lines[0] == "digits, on 8 calibration examples that were not drawn"
    assert lines[1].split() == ["block", "drift", "local", "upstream", "cosine", "Frechet"]
    assert [line.split()[0] for line in lines[2:4]] == ["encoder.layers.0", "encoder.layers.1"]
    assert "mean of 2 tasks" in answer.out
    assert "final features, which heads read" in answer.out
    assert plot.read_text().startswith("<svg")
    assert (spec.parent / "out" / "calibrated" / "model.safetensors").is_file()


def test_drift_goes_into_the_report_of_a_run_that_is_there(spec_at, merging_command):
    spec = spec_at(24, {"type": "featcal"})
    merging_command("pipeline", "run", spec, "--quiet")
    place = spec.parent / "out" / "report.json"
    before = Report.read(place)

    answer = merging_command("drift", spec, "--examples", 3, "--json", "--quiet")

    found, after = answer.json(), Report.read(place)
    assert found == json.loads(after.drift.model_dump_json())
    assert found["examples"] == found["output"]["digits"]["examples"] == 3
    assert found["mean"][0]["merged"]["frechet"] > 0
    assert before.drift.mean[0].merged.frechet is None
    assert after.model_copy(update={"drift": before.drift}) == before
    assert merging_command("verify", spec.parent / "out").code == 0
    assert Pipeline.from_spec(spec).run() == after


def test_a_merge_alone_has_one_number_in_each_column(spec_at, merging_command):
    answer = merging_command("drift", spec_at(24, None), "--no-frechet", "--quiet")

    row = answer.out.splitlines()[2].split()
    assert row[0] == "encoder.layers.0"
    assert len(row) == 5
    assert "->" not in row


def test_the_final_features_of_plugins_are_corrected_ones(spec_at, merging_command):
    spec = spec_at(24, {"type": "surgery", "iterations": 60})

    found = merging_command("drift", spec, "--no-frechet", "--json", "--quiet").json()

    for row in found["mean"]:
        assert row["merged"] == row["calibrated"]
    for row in found["output"].values():
        assert row["calibrated"]["distance"] < row["merged"]["distance"]


def test_nothing_to_measure_on_is_said(spec_at, merging_command):
    spec = spec_at(24, None, tasks={})

    answer = merging_command("drift", spec, "--quiet")

    assert answer.code == 2
    assert "no task has any (experts: digits, letters; tasks with examples: none)" in answer.err
    assert '"calibration" source' in answer.err
    assert not (spec.parent / "out").exists()


def test_help_shows_an_example(merging_command):
    answer = merging_command("drift", "--help")

    assert "merging drift spec.json --plot drift.svg" in " ".join(answer.out.split())
