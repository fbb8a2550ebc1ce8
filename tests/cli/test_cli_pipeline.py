"""`merging pipeline` with a pipeline that does nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from merging.report.entry import Entry


class FakePlan(Entry):
    device: str = "cpu"
    disk_bytes: int = 3_000_000
    steps: tuple[dict, ...] = ({"step": "merge", "method": "ties", "peak_bytes": 2_000_000_000},)
    experts: dict[str, dict] = {"a": {"coefficient": 0.4}, "b": {"coefficient": 0.4}}
    notes: tuple[str, ...] = ("a remark",)


@pytest.fixture
def asked(monkeypatch):
    """What the command line asked the pipeline for."""
    from merging.pipeline import Pipeline
    from merging.report.report import Report

    calls = {}

    def run(self, out=None, **options):
        options.pop("progress")("merge", 1, 2)
        calls.update(options, out=out, scale=self.spec.merge.settings.scale)
        return Report.of(tasks={}, checkpoint="out/calibrated", warnings=["beware"])

    monkeypatch.setattr(Pipeline, "run", run)
    monkeypatch.setattr(Pipeline, "plan", lambda self, **options: FakePlan())
    monkeypatch.setattr(Pipeline, "validate", lambda self, **options: ["40 of 256 examples"])
    return calls


def test_run_ends_with_the_path_of_the_final_checkpoint(asked, merging_command, spec_file):
    answer = merging_command("pipeline", "run", spec_file)

    assert answer.code == 0
    assert answer.out.splitlines()[-1] == "out/calibrated"
    assert "warning: beware" in answer.out
    assert "merge" in answer.err


def test_options_reach_the_pipeline(asked, merging_command, spec_file):
    options = ["--out", "o", "--until", "merge", "--device", "cpu", "--overwrite", "--set", "merge.scale=1"]

    merging_command("pipeline", "run", spec_file, *options)

    assert asked == {"out": Path("o"), "until": "merge", "device": "cpu", "overwrite": True, "scale": 1}


def test_quiet_says_nothing_on_stderr(asked, merging_command, spec_file):
    assert merging_command("pipeline", "run", spec_file, "--quiet").err == ""


def test_json_is_all_that_is_on_stdout(asked, merging_command, spec_file):
    answer = merging_command("pipeline", "run", spec_file, "--json")

    assert answer.json()["checkpoint"] == "out/calibrated"


def test_other_processes_of_torchrun_are_silent(asked, merging_command, spec_file, monkeypatch):
    monkeypatch.setenv("RANK", "1")

    answer = merging_command("pipeline", "run", spec_file)

    assert (answer.code, answer.out, answer.err) == (0, "", "")


def test_plan_is_shown_in_sections(asked, merging_command, spec_file):
    answer = merging_command("pipeline", "plan", spec_file)

    assert answer.code == 0
    assert "disk    3 MB" in answer.out
    assert "2 GB" in answer.out
    assert "a remark" in answer.out


def test_plan_as_json(asked, merging_command, spec_file):
    assert merging_command("pipeline", "plan", spec_file, "--json").json()["device"] == "cpu"


def test_validate_says_that_all_is_well(asked, merging_command, spec_file):
    answer = merging_command("pipeline", "validate", spec_file)

    assert answer.code == 0
    assert "is valid" in answer.out
    assert "40 of 256" in answer.err


def test_validate_as_json(asked, merging_command, spec_file):
    answer = merging_command("pipeline", "validate", spec_file, "--json")

    assert answer.json() == {"valid": True, "findings": ["40 of 256 examples"]}


def test_schema_is_json(merging_command):
    answer = merging_command("pipeline", "schema")

    assert json.loads(answer.out)["required"] == ["base", "merge"]
