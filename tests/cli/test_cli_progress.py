"""Progress where stderr is not a terminal."""

from __future__ import annotations

import re

import pytest
from merging_cli.progress import Pace, PlainProgress, duration, line, size
from merging_cli.render import render_plan, table


def _told(seconds_each: float, total: int = 100, repeated: int = 1) -> list[str]:
    lines: list[str] = []
    now = [0.0]
    progress = PlainProgress(lines.append, lambda: now[0])
    for done in range(total + 1):
        for _ in range(repeated):
            progress("merge", done, total)
            now[0] += seconds_each
    return lines


def test_lines_come_at_the_start_for_every_tenth_and_at_the_end():
    lines = _told(0.1)

    assert len(lines) == 11
    assert "0 of 100" in lines[0]
    assert "10 of 100" in lines[1]
    assert "done in 10 s" in lines[-1]


def test_slow_work_is_told_after_half_a_minute_of_it():
    lines = _told(20.0, total=1000)[:4]

    assert [text.split("  ")[-3].strip() for text in lines[1:]] == ["2 of 1000", "4 of 1000", "6 of 1000"]


def test_the_same_is_not_told_again():
    lines = _told(40.0, total=2, repeated=50)

    assert len(lines) == 3


def test_a_stage_that_is_whole_from_the_start_and_one_of_nothing_end_once():
    lines: list[str] = []
    progress = PlainProgress(lines.append, lambda: 0.0)

    for stage, total in (("merge", 0), ("write", 5)):
        progress(stage, total, total)
        progress(stage, total, total)

    assert len(lines) == 2


def test_starting_up_is_no_measure_of_the_pace():
    lines: list[str] = []
    now = [0.0]
    progress = PlainProgress(lines.append, lambda: now[0])
    for _ in range(600):  # a minute in which processes load their libraries
        progress("train", 0, 100)
        now[0] += 0.1
    for done in range(1, 101):
        now[0] += 1.0
        progress("train", done, 100)

    assert all("left" not in text for text in lines[:2])
    foretold = [text.split("  ") for text in lines if "left" in text]
    assert len(foretold) == 9
    for parts in foretold:
        done = int(re.search(r"(\d+) of 100", "  ".join(parts))[1])
        minutes, seconds = re.fullmatch(r"(?:(\d+) min )?(\d+) s left", parts[-1]).groups(default="0")
        assert 60 * int(minutes) + int(seconds) == pytest.approx(100 - done, rel=0.2)
    assert "done in 2 min 40 s" in lines[-1]


def test_no_end_is_foretold_while_the_pace_changes():
    pace = Pace(0.0, 0)
    pace.add(100.0, 1)
    assert not pace.known

    for second in range(1, 21):
        pace.add(100.0 + second, 1 + second)
    assert not pace.known

    for second in range(21, 1000):
        pace.add(100.0 + second, 1 + second)
    assert pace.known
    assert pace.advanced == 1000
    assert pace.seconds == 1099


def test_no_end_is_foretold_beyond_a_day():
    assert "left" not in line("train", 1, 10**5, advanced=1, seconds=1000)
    assert "left" in line("train", 50, 100, advanced=50, seconds=1000)


def test_each_stage_begins_anew():
    lines: list[str] = []
    progress = PlainProgress(lines.append, lambda: 0.0)

    progress("merge", 1, 1)
    progress("write", 1, 1)

    assert [text.split()[0] for text in lines] == ["merge", "write"]


def test_large_totals_are_bytes():
    text = line("merge", 1_500_000_000, 3_000_000_000, advanced=1_500_000_000, seconds=5)

    assert text.split("  ")[-3:] == ["1.5 GB of 3 GB", "300 MB/s", "5 s left"]


def test_units():
    assert [size(999), size(1500), size(2.5e12)] == ["999 B", "1.5 kB", "2.5 TB"]
    assert [duration(3), duration(90), duration(3700)] == ["3 s", "1 min 30 s", "1 h 1 min"]


def test_tables_align_numbers_to_the_right():
    assert table(["name", "n"], [["a", 5], ["long", 10]]) == "name   n\na      5\nlong  10"


def test_an_empty_plan_is_empty():
    assert render_plan({}) == ""
