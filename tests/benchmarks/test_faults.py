"""Trials of faults at a small size, and that they see a fault where there is one."""

from __future__ import annotations

import json
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from benchmarks.faults import folders, mutations, workshop
from benchmarks.faults.disk_full import _unclear
from benchmarks.faults.forge import Blow, Ended, command
from benchmarks.faults.fuzz import Bench, header
from benchmarks.faults.fuzz import files as fuzz_files
from benchmarks.faults.kills import _unstarted
from benchmarks.faults.soak import faults
from benchmarks.faults.watch import watched
from benchmarks.section import Section, write_part
from merging.errors import SpecError

REPOSITORY = Path(__file__).parents[2]
SECTION = Section("Kills", "python -m benchmarks kills", ["2 cores"], ["| a |"])


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    folder = tmp_path_factory.mktemp("faults")
    with pytest.MonkeyPatch.context() as patch:
        for name in workshop.ENVIRONMENT:
            patch.setenv(name, "")
        patch.setattr(constants, "HF_HUB_OFFLINE", True)  # read when it was imported
        patch.setattr(tempfile, "tempdir", None)
        workshop.settle(folder)
        yield Bench(folder)


def test_mutated_specs_are_accepted_or_refused_with_a_clear_error(bench: Bench) -> None:
    tally = bench.specs(random.Random(0), 100)

    assert tally.faults == []
    assert tally.kinds["SpecError"] > 20
    assert tally.kinds["done"] > 2


def test_mutated_specs_run_or_are_refused_with_a_clear_error(bench: Bench) -> None:
    tally = bench.runs(random.Random(1), 4)

    assert tally.faults == []


def test_mutated_headers_and_indexes_are_refused_with_a_clear_error(bench: Bench) -> None:
    tally = bench.headers(random.Random(0), 40)

    assert tally.faults == []
    assert tally.kinds["CheckpointError"] > 25


def test_mutated_adapter_configs_are_read_or_refused_with_a_clear_error(bench: Bench) -> None:
    tally = bench.adapters(random.Random(0), 20)

    assert tally.faults == []
    assert tally.kinds["CheckpointError"] > 3
    assert tally.kinds["done"] > 3


def test_mutated_files_beside_weights_are_read_or_refused_with_a_clear_error(bench: Bench) -> None:
    tallies = fuzz_files(bench.folder / "files", 0, 3)

    assert [fault for tally in tallies.values() for fault in tally.faults] == []
    assert {kind for tally in tallies.values() for kind in tally.kinds} >= {"CheckpointError", "DataError"}


def test_mutations_are_those_of_their_seed_and_leave_the_original_alone() -> None:
    good = {"a": [1, {"b": "text"}], "c": 0.5}

    found = [
        [mutations.text_of(mutations.mutated(good, random.Random(seed))) for seed in range(50)]
        for _ in range(2)
    ]

    assert found[0] == found[1]
    assert len(set(found[0])) > 30
    assert good == {"a": [1, {"b": "text"}], "c": 0.5}


def test_a_mutated_header_keeps_the_data_of_its_file() -> None:
    text = json.dumps({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    content = len(text).to_bytes(8, "little") + text + b"data"

    made = [header(content, random.Random(seed)) for seed in range(40)]

    assert len({bytes(one) for one in made}) > 30
    assert sum(one.endswith(b"data") for one in made) > 25


def _fails() -> None:
    raise KeyError("x")


def _refuses() -> None:
    raise SpecError("the spec is wrong")


def _hangs() -> None:
    while True:
        time.sleep(0.01)


def _connects() -> None:
    with socket.socket() as one:
        one.connect_ex(("127.0.0.1", 9))


@pytest.mark.parametrize(
    ("action", "kind", "said"),
    [
        (_fails, "fault", "KeyError"),
        (_refuses, "SpecError", "the spec is wrong"),
        (_hangs, "fault", "longer than"),
        (_connects, "fault", "socket.connect"),
        (lambda: None, "done", ""),
    ],
    ids=["other errors", "our errors", "hangs", "connections", "nothing"],
)
def test_the_watch_tells_faults_from_refusals(action: Any, kind: str, said: str, tmp_path: Path) -> None:
    outcome = watched(action, [tmp_path], limit=0.1)

    assert outcome.kind == kind
    assert said in outcome.what


def test_the_watch_sees_what_is_written_or_removed_outside(tmp_path: Path) -> None:
    inside, outside = tmp_path / "inside", tmp_path / "outside"
    inside.mkdir()
    outside.mkdir()
    (outside / "file").touch()

    assert watched((inside / "new").touch, [inside]).kind == "done"
    assert "outside/new" in watched((outside / "new").touch, [inside]).what
    assert "outside/file" in watched((outside / "file").unlink, [inside]).what
    assert "moved" in watched(lambda: outside.rename(tmp_path / "moved"), [inside, outside]).what


def test_a_child_is_struck_at_a_step_and_answers() -> None:
    words = ["pipeline", "validate", "no/such/spec.json"]

    assert command(words).code == 2
    assert "no/such/spec.json" in command(words).said
    assert command(words, Blow(at=1)).code == -signal.SIGKILL
    assert command(words, Blow(signal.SIGINT, at=1)).code == 130
    assert command(words, Blow(signal.SIGTERM, at=1)).code == 143


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda out: (out / "merged" / "model.safetensors").write_bytes(b"half"), "merged/ looks finished"),
        (lambda out: (out / "merged" / "config.json").unlink(), "merged/ looks finished"),
        (lambda out: (out / "report.json").write_text('{"check'), "report.json is not whole"),
        (lambda out: (out / "merged" / "model.safetensors").unlink(), "which is not whole"),
    ],
    ids=["half a file", "a file less", "half a report", "a report of nothing"],
)
def test_what_looks_finished_and_is_not_is_seen(tmp_path: Path, change: Any, said: str) -> None:
    whole = {
        "merged/model.safetensors": b"weights",
        "merged/config.json": b"{}",
        "report.json": b'{"checkpoint": "out/merged"}',
    }
    folders.put(tmp_path, whole)
    made = folders.results(tmp_path)
    assert folders.unfinished(tmp_path, made) == []

    change(tmp_path)

    assert any(said in fault for fault in folders.unfinished(tmp_path, made))


def test_users_files_that_are_lost_and_files_left_behind_are_seen(tmp_path: Path) -> None:
    folders.put(tmp_path, folders.USERS)
    (tmp_path / "notes.txt").write_text("changed")
    (tmp_path / ".merged.partial-01234567").mkdir()

    assert folders.lost(tmp_path, folders.USERS, moved=False) == ["notes.txt of the user is not what it was"]
    assert folders.stray(tmp_path, {}, folders.USERS) == [".merged.partial-01234567 was left behind"]


def test_growth_of_memory_and_of_open_files_is_seen() -> None:
    assert faults([(100.0, 9, 1)] * 40) == []
    assert faults([(100.0 + run, 9, 1) for run in range(40)]) == ["memory grows by 24.0 MiB"]
    assert faults([(100.0, 9 + (run == 35), 1) for run in range(40)]) == ["open files vary: 9 to 10"]


@pytest.mark.parametrize(
    ("code", "said", "clear"),
    [
        (1, "error: no room to write in out: No space left on device", True),
        (1, "error: unexpected OSError: No space left on device", False),
        (1, "error: something is wrong", False),
        (70, "error: no room to write in out", False),
    ],
)
def test_an_error_of_a_full_disk_must_be_clear(code: int, said: str, clear: bool) -> None:
    assert (not _unclear(code, said)) == clear


def test_a_measured_part_replaces_the_one_of_its_title(tmp_path: Path) -> None:
    page = tmp_path / "reliability.md"
    page.write_text("# Reliability\n\n## Faults\n\nA table.\n", encoding="utf-8")

    for body in ("old", "new"):
        write_part(page, Section(SECTION.title, SECTION.command, SECTION.facts, [body]))
    write_part(page, Section("Soak", "python -m benchmarks soak", ["2 cores"], ["| b |"]))

    text = page.read_text(encoding="utf-8")
    assert re.findall(r"(?m)^#+ .*", text) == [
        "# Reliability",
        "## Faults",
        "## Measured",
        "### Kills",
        "### Soak",
    ]
    assert "new" in text
    assert "old" not in text


@pytest.mark.slow
@pytest.mark.parametrize(
    "words", [["kills", "--kills", "8"], ["disk_full", "--points", "12"], ["soak", "--runs", "20"]]
)
def test_a_trial_finds_no_fault(tmp_path: Path, words: list[str]) -> None:
    asked = [sys.executable, "-m", "benchmarks", *words, "--work", str(tmp_path)]

    found = subprocess.run(asked, cwd=REPOSITORY, capture_output=True, text=True, timeout=500)

    assert found.returncode == 0, found.stdout + found.stderr


@pytest.mark.parametrize(
    ("ended", "sign", "written", "before_start"),
    [
        (Ended(-15, 0.01, "", began=False), signal.SIGTERM, False, True),
        (Ended(-2, 0.01, "", began=False), signal.SIGINT, False, True),
        (Ended(-15, 0.01, "", began=True), signal.SIGTERM, False, False),
        (Ended(-15, 0.01, "Traceback", began=False), signal.SIGTERM, False, False),
        (Ended(-15, 0.01, "", began=False), signal.SIGTERM, True, False),
        (Ended(-15, 0.01, "", began=False), signal.SIGINT, False, False),
        (Ended(-9, 0.01, "", began=False), signal.SIGKILL, False, False),
        (Ended(143, 0.01, "", began=False), signal.SIGTERM, False, False),
    ],
)
def test_only_a_run_that_had_begun_nothing_is_counted_apart(
    ended: Ended, sign: signal.Signals, written: bool, before_start: bool
) -> None:
    after = {"notes.txt": b"mine", "half": b""} if written else {"notes.txt": b"mine"}

    assert _unstarted(ended, Blow(sign), {"notes.txt": b"mine"}, after) == before_start


def test_a_child_says_whether_it_had_come_to_answer_signals() -> None:
    ended = command(["--version"])

    assert ended.began
    assert ended.said.startswith("merging")
