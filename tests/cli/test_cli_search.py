"""`merging pipeline run --sweep` on real small checkpoints, and what it refuses before it starts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from test_pipeline import spec_of, workshop  # noqa: F401


@pytest.fixture
def spec(workshop: Path, tmp_path: Path) -> Path:  # noqa: F811
    path = tmp_path / "spec.json"
    path.write_text(json.dumps(spec_of(workshop, merge={"type": "task_arithmetic"}, calibrate=[])))
    return path


def test_a_sweep_prints_its_curve_and_ends_with_the_checkpoint(merging_command, spec, tmp_path):
    answer = merging_command(
        "pipeline", "run", spec, "--out", tmp_path / "out", "--sweep", "merge.scale=0.2:0.6:0.2"
    )

    assert answer.code == 0
    lines = answer.out.splitlines()
    assert lines[0].split() == ["merge.scale", "digits", "letters", "signs", "mean"]
    assert sum("<- taken" in line for line in lines) == 1
    assert lines[-1] == str(tmp_path / "out" / "merged")
    assert "search" in answer.err


def test_a_sweep_as_json_holds_the_whole_curve(merging_command, spec, tmp_path):
    sweeps = ["--sweep", "merge.scale=0.2,0.4", "--sweep", "merge.normalize=true,false"]

    answer = merging_command(
        "pipeline", "run", spec, "--out", tmp_path / "out", *sweeps, "--criterion", "entropy", "--json"
    )

    curve = answer.json()["curve"]
    assert curve["criterion"] == "entropy"
    assert [point["values"] for point in curve["points"]] == [
        {"merge.scale": scale, "merge.normalize": normalize}
        for scale in (0.2, 0.4)
        for normalize in (True, False)
    ]
    assert answer.json()["spec"]["merge"]["scale"] == curve["best"]["merge.scale"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--sweep", "merge.scal=1,2"], 'did you mean "scale"?'),
        (["--sweep", "merge.scale=a:b:c"], '"a:b:c" is not a range of numbers'),
        (["--sweep", "merge.scale=0:1:0.001"], "has 1001 values; at most 200"),
        (["--criterion", "entropy"], "there is no --sweep"),
    ],
)
def test_a_sweep_that_cannot_be_run_is_a_wrong_request(merging_command, spec, tmp_path, options, words):
    answer = merging_command("pipeline", "run", spec, "--out", tmp_path / "out", *options)

    assert answer.code == 2
    assert words in answer.err
    assert not (tmp_path / "out").exists()
