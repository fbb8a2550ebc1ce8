"""`merging demo` with a suite that is already there."""

from __future__ import annotations

from pathlib import Path


def test_demo_runs_the_spec_that_it_leaves(merging_command, spec_file, monkeypatch):
    import merging.demo
    from merging.pipeline import Pipeline
    from merging.report.report import Report

    built = []
    monkeypatch.setattr(merging.demo, "build", lambda folder, progress: built.append(folder) or spec_file)
    monkeypatch.setattr(Pipeline, "run", lambda self, progress: Report.of(tasks={}, checkpoint="the/end"))

    answer = merging_command("demo", "--out", "there")

    assert answer.code == 0
    assert built == [Path("there")]
    assert f"merging pipeline run {spec_file}" in answer.out
    assert str(spec_file.parent / "models" / "a") in answer.out
    assert answer.out.splitlines()[-1] == "the/end"
