"""Tables at toy sizes in one process: what they start is called here, where torch is imported already."""

from __future__ import annotations

import importlib
import io
import shutil
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
from pathlib import Path

import pytest

from benchmarks import children, measure
from benchmarks.__main__ import main
from benchmarks.measure import Contender, Measurement


def in_process(module: str, *words: str, environment: Mapping[str, str] | None = None) -> str:
    """What `python -m MODULE WORDS` would print."""
    said = io.StringIO()
    with redirect_stdout(said), pytest.MonkeyPatch.context() as patch:
        for name, value in (environment or {}).items():
            patch.setenv(name, value)
        if module == "merging":
            code = importlib.import_module("merging_cli.main").main(list(words))
            assert code == 0, f"merging {words} ended with {code}"
        else:
            importlib.import_module(module).main(words)
    return said.getvalue()


def measured(contender: Contender, log: Path, *, cold: bool = False) -> Measurement:
    """The run itself is real, its cost is made up."""
    for folder in contender.fresh:
        shutil.rmtree(folder, ignore_errors=True)
    words = contender.command[1:]
    last = max(place for place, word in enumerate(words) if word == "-m")
    in_process(*words[last + 1 :], environment=contender.environment)
    stages = {} if contender.report is None else measure._stages(contender.report)
    return Measurement(contender.label, 2.0, 1.0, 1.0, 100.0, 50.0, 50.0, 0.0, 0.0, stages)


@pytest.fixture(scope="session")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that all tables keep their inputs in."""
    return tmp_path_factory.mktemp("inputs")


@pytest.fixture
def table(
    inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., str]:
    """Runs a table as the command does, and gives what it prints."""
    monkeypatch.setattr(children, "ask", in_process)
    monkeypatch.setattr(measure, "once", measured)

    def run(name: str, *words: str) -> str:
        places = ("--inputs", str(inputs), "--work", str(tmp_path / "work"))
        assert main([name, "--toy", "--runs", "1", *places, *words]) == 0
        return capsys.readouterr().out

    return run
