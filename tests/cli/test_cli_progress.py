"""Progress where stderr is not a terminal."""

from __future__ import annotations

from merging_cli.progress import PlainProgress, duration, line, size
from merging_cli.render import render_plan, table


def test_lines_come_at_the_start_at_most_every_few_seconds_and_at_the_end():
    lines: list[str] = []
    now = [0.0]
    progress = PlainProgress(lines.append, lambda: now[0])

    for done in range(101):
        progress("merge", done, 100)
        now[0] += 0.1
    progress("merge", 100, 100)

    assert len(lines) == 5
    assert "0 of 100" in lines[0]
    assert "31 of 100" in lines[2] or "30 of 100" in lines[1]
    assert "done in 10 s" in lines[-1]


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
