"""`merging demo` with a suite that is already there."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [
        ((), (Path("merging-demo"), "vision")),
        (("--suite", "llm"), (Path("merging-demo-llm"), "llm")),
        (("--suite", "llm", "--out", "there"), (Path("there"), "llm")),
    ],
)
def test_demo_runs_the_spec_that_it_leaves(merging_command, spec_file, monkeypatch, arguments, meant):
    import merging_cli.demo

    from merging.pipeline import Pipeline
    from merging.report.report import Report

    built = []
    monkeypatch.setattr(
        merging_cli.demo,
        "build",
        lambda folder, suite, progress: built.append((folder, suite.name)) or spec_file,
    )
    monkeypatch.setattr(Pipeline, "run", lambda self, progress: Report.of(tasks={}, checkpoint="the/end"))

    answer = merging_command("demo", *arguments)

    assert answer.code == 0
    assert built == [meant]
    assert f"merging pipeline run {spec_file}" in answer.out
    assert str(spec_file.parent / "models" / "a") in answer.out
    assert answer.out.splitlines()[-1] == "the/end"


def test_help_tells_the_suites(merging_command):
    told = " ".join(merging_command("demo", "--help").out.split())

    assert "vision: three image tasks" in told
    assert "llm: three text tasks" in told
