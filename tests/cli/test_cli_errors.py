"""What users see when something is wrong: messages, exit codes, never a traceback."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file

from merging.errors import MergingError, RuleError, SpecError


@pytest.fixture
def failing(monkeypatch):
    """Makes `merging pipeline run` fail with a given exception."""

    def fail_with(error: BaseException) -> None:
        from merging.pipeline import Pipeline

        def run(*_args, **_kwargs):
            raise error

        monkeypatch.setattr(Pipeline, "run", run)

    return fail_with


def test_a_wrong_spec_is_exit_2_with_every_problem_on_stderr(merging_command, spec_file):
    answer = merging_command("pipeline", "validate", spec_file, "--set", "merge.type=tiess", "--set", "sed=1")

    assert answer.code == 2
    assert answer.out == ""
    assert answer.err.startswith("error: ")
    assert 'did you mean "ties"' in answer.err
    assert 'did you mean "seed"' in answer.err
    assert "Traceback" not in answer.err


def test_errors_are_one_document_with_json(merging_command, spec_file):
    answer = merging_command("pipeline", "plan", spec_file, "--set", "merge.type=tiess", "--json")

    error = answer.json()["error"]
    assert answer.code == 2
    assert answer.err == ""
    assert error["problems"][0]["where"] == "merge.type"
    assert set(error) == {"message", "problems", "remedy"}


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (SpecError("wrong request"), 2, "error: wrong request"),
        (RuleError("rule failed", remedy="Try another."), 1, "error: rule failed\n  Try another."),
        (MergingError("something"), 1, "error: something"),
        (ZeroDivisionError("by zero"), 1, "error: unexpected ZeroDivisionError: by zero; run with --debug"),
        (KeyboardInterrupt(), 130, "interrupted"),
    ],
)
def test_each_kind_of_failure_has_its_exit_code(error, code, words, merging_command, spec_file, failing):
    failing(error)

    answer = merging_command("pipeline", "run", spec_file, "--quiet")

    assert answer.code == code
    assert words in answer.err
    assert answer.out == ""


@pytest.mark.parametrize(
    "arguments",
    [["--debug", "pipeline", "run"], ["pipeline", "--debug", "run"], ["pipeline", "run", "--debug"]],
)
def test_debug_shows_the_traceback_wherever_it_stands(arguments, merging_command, spec_file, failing):
    failing(ZeroDivisionError("by zero"))

    with pytest.raises(ZeroDivisionError):
        merging_command(*arguments, spec_file)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["lsit"], "No such command"),
        (["pipeline", "rnu"], "No such command"),
        (["pipeline", "run"], "Missing argument"),
        (["pipeline", "run", "spec.json", "--desity", "3"], "No such option"),
        (["pipeline", "run", "spec.json", "--until", "lunch"], "until"),
        (["show", "tie"], 'did you mean "ties"'),
        (["list", "strategy"], 'did you mean "strategies"'),
        (["demo", "--suite", "visoin"], 'did you mean "vision"'),
        (["pipeline", "run", "no-such-spec.json"], "there is no file"),
        (["inspect", "./no-such-model"], "does not exist"),
    ],
)
@pytest.mark.parametrize("as_json", [False, True])
def test_wrong_arguments_are_exit_2(arguments, words, as_json, merging_command):
    answer = merging_command(*arguments, *(["--json"] if as_json and arguments[0] != "demo" else []))

    assert answer.code == 2
    told = answer.out if as_json and arguments[0] != "demo" else answer.err
    assert words.replace('"', '\\"') in told if answer.out else words in told
    if answer.out:
        assert "error" in json.loads(answer.out)


@pytest.mark.skipif(os.name == "nt", reason="pipes of POSIX")
def test_a_reader_that_has_seen_enough_is_no_failure():
    command = f"{sys.executable} -m merging pipeline schema | head -n 1"

    done = subprocess.run(command, shell=True, capture_output=True, text=True)

    assert done.stdout == "{\n"
    assert done.stderr == ""


def test_names_that_would_steer_the_terminal_are_shown_as_escapes(merging_command, tmp_path):
    """Clear the screen, set the title, turn the order of the text: from the name of a tensor."""
    evil = "\x1b[2J\x1b]0;gone\x07\u202etxet"
    (tmp_path / "model").mkdir()
    save_file({evil: torch.ones(2)}, tmp_path / "model" / "model.safetensors")
    (tmp_path / "spec.json").write_text(json.dumps({evil: 1}))

    shown = merging_command("inspect", tmp_path / "model").out
    told = merging_command("pipeline", "validate", tmp_path / "spec.json").err

    for text in (shown, told):
        assert not set(text) & set("\x1b\x07\u202e")
    assert "\\x1b[2J\\x1b]0;gone\\x07\\u202etxet" in shown


@pytest.mark.parametrize(("option", "code"), [("-OO", 2), ("-O", 0)])
def test_python_without_docstrings_is_refused_before_libraries_are_loaded(option, code):
    command = [sys.executable, option, "-m", "merging", "list"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)

    assert ended.returncode == code, ended.stderr
    assert ended.stderr.startswith("error: Python runs without docstrings (-OO") == (option == "-OO")
    assert "[ERROR]" not in ended.stderr
