"""What the tables rest on: processes measured, operations counted, sections kept in their place."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import pytest

from benchmarks.comparison import comparison_rows
from benchmarks.inputs import Texts, at_hand
from benchmarks.machine import load
from benchmarks.measure import BenchmarkError, Contender, Measurement, in_turn, ratio
from benchmarks.operations import operations, walk_of
from benchmarks.options import add_common, shown
from benchmarks.peers import mergekit
from benchmarks.section import Section, write_section
from benchmarks.shapes import ClipVision, Llama, parameters
from benchmarks.tables.growth import exponent

SECTION = Section("Merging", "python -m benchmarks merge", ["2 cores"], ["| a |"])


def run_of(label: str, wall: float) -> Measurement:
    return Measurement(label, wall, 1.0, 0.5, 100.0, 60.0, 40.0, 0.1, 0.2)


def test_contenders_run_in_turn_from_clean_folders(tmp_path: Path) -> None:
    order, made = tmp_path / "order", tmp_path / "made"
    script = f"mkdir {made} && printf $WHO >> {order}"
    contenders = [
        Contender(who, ("/bin/sh", "-c", script), {"WHO": who}, fresh=(made,)) for who in ("a", "b")
    ]

    runs = in_turn(contenders, runs=2, warmup=1, work=tmp_path / "work")

    assert order.read_text() == "ababab"
    assert {who: len(several) for who, several in runs.items()} == {"a": 2, "b": 2}
    assert "over 4 runs" in load(tmp_path / "work")


def test_memory_of_a_process_is_its_own(tmp_path: Path) -> None:
    script = "import time; held = bytearray(60 << 20); time.sleep(0.3)"

    (run,) = in_turn([Contender("a", (sys.executable, "-c", script))], runs=1, work=tmp_path)["a"]

    assert 60 < run.anonymous < 120
    assert run.anonymous <= run.peak
    assert run.wall > 0.3


def test_a_peer_that_fails_is_a_row_and_is_not_run_again(tmp_path: Path) -> None:
    fails = ("/bin/sh", "-c", "echo no such layer >&2; exit 3")
    contenders = [
        Contender("ours", ("/bin/true",)),
        Contender("theirs", fails, may_fail=True),
    ]

    runs = in_turn(contenders, runs=3, work=tmp_path)

    assert len(runs["ours"]) == 3
    assert [one.failure for one in runs["theirs"]] == ["exit 3: no such layer"]
    assert comparison_rows("x", runs, "ours")[2][-1] == "exit 3: no such layer"


def test_our_own_failure_stops_the_table(tmp_path: Path) -> None:
    with pytest.raises(BenchmarkError, match=r"ours failed: exit 1: .*output\.log"):
        in_turn([Contender("ours", ("/bin/false",))], runs=1, work=tmp_path)


def test_ratios_are_taken_round_by_round() -> None:
    ours = [run_of("a", wall) for wall in (1.0, 10.0, 2.0)]
    theirs = [run_of("b", wall) for wall in (3.0, 30.0, 6.0)]

    assert ratio(theirs, ours) == 3.0


def test_operations_of_featcal_on_vit_b_32() -> None:
    shape = ClipVision()
    walk = walk_of(shape.linears, hidden=768, blocks=12, tasks=8, examples=64, length=shape.tokens)

    counts = operations("featcal", walk)

    tokens, wide, inner = 64 * 50, 768, 3072
    assert counts["half Grams"] == 96 * tokens * (3 * wide**2 + inner**2)
    assert counts["cross moments"] == 96 * 2 * tokens * (3 * wide**2 + wide * inner)
    assert sum(counts.values()) == pytest.approx(19.8e12, rel=0.01)
    assert sum(operations("regmean", walk).values()) < sum(operations("regmean_plus_plus", walk).values())


def test_default_shapes_are_the_models_they_are_named_for() -> None:
    assert parameters(Llama()) == pytest.approx(1.10e9, rel=0.01)
    assert parameters(ClipVision()) == 87_456_000


def test_inputs_of_another_size_are_refused(tmp_path: Path) -> None:
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "config.json").write_text(json.dumps(Llama(hidden=64).config()))

    with pytest.raises(BenchmarkError, match="hidden_size is 64, wanted 2048; remove the folder"):
        at_hand(tmp_path, Texts())


def test_the_exponent_of_a_power() -> None:
    assert exponent([(x, 3 * x**1.5) for x in (1, 2, 4, 8)]) == pytest.approx(1.5)
    assert exponent([(1, 7), (2, 7), (4, 7)]) == pytest.approx(0, abs=1e-12)


def test_a_section_takes_the_place_of_its_former_self(tmp_path: Path) -> None:
    page = tmp_path / "benchmarks.md"
    write_section(page, SECTION)
    write_section(page, Section("Calibrating", "c", [], ["| b |"]))

    write_section(page, Section("Merging", "again", [], ["| new |"]))

    text = page.read_text(encoding="utf-8")
    assert [line for line in text.split("\n") if line.startswith("#")] == [
        "# Benchmarks",
        "## Merging",
        "## Calibrating",
    ]
    assert "| new |" in text
    assert "| a |" not in text
    assert "| b |" in text


def test_a_command_is_shown_without_this_machines_paths() -> None:
    parser = argparse.ArgumentParser()
    add_common(parser)

    said = shown(parser, ["merge", "--inputs", "/home/me/data", "--runs", "3", "--toy"])

    assert said == "python -m benchmarks merge --inputs INPUTS --runs 3 --toy"


def test_mergekit_gets_its_config_and_runs_twice(tmp_path: Path) -> None:
    text = mergekit.config("ties", [tmp_path / "a"], base=tmp_path / "b", each={"weight": 0.3})

    plain, tuned = mergekit.contenders(Path("mergekit-yaml"), text, tmp_path, ["--lazy-unpickle"])

    assert json.loads((tmp_path / "config.yaml").read_text())["base_model"] == str(tmp_path / "b")
    assert plain.command == tuned.command
    assert plain.command[-1] == "--lazy-unpickle"
    assert "MALLOC_TOP_PAD_" in tuned.environment
