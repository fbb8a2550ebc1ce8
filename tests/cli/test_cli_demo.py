"""`merging demo` with a suite that is already there."""

from __future__ import annotations

import sys
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


@pytest.mark.parametrize(
    ("started", "on_path", "typed"),
    [
        ("bin/merging", True, "merging"),
        ("bin/merging", False, "bin/merging"),
        ("my tools/merging", False, "'my tools/merging'"),
        ("merging/__main__.py", True, f"{sys.executable} -m merging"),
    ],
)
def test_the_command_to_go_on_with_is_one_that_is_found(tmp_path, monkeypatch, started, on_path, typed):
    import merging_cli.demo

    for place in {"bin/merging", started}:
        (tmp_path / place).parent.mkdir(exist_ok=True)
        (tmp_path / place).touch(mode=0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [started])
    monkeypatch.setenv("PATH", str(tmp_path / "bin") if on_path else str(tmp_path))

    assert merging_cli.demo.this_command() == typed


def test_help_tells_the_suites(merging_command):
    told = " ".join(merging_command("demo", "--help").out.split())

    assert "vision: three image tasks" in told
    assert "llm: three text tasks" in told
