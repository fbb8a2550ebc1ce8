"""docs/reliability.md: every case has its tests, and the counts are those of the table."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

TESTS = Path(__file__).parents[1]
PAGE = (TESTS.parent / "docs" / "reliability.md").read_text(encoding="utf-8")
CASE = re.compile(r"^\| (.+) \| (.+) \| (refused|handled|warned|stopped) \| (.+) \|$", re.MULTILINE)
NAMED = re.compile(r"`([\w/]+\.py)::(\w+)`")


def test_the_page_has_every_case_once_with_a_test() -> None:
    cases = CASE.findall(PAGE)

    assert len(cases) == 75
    assert len({meets for meets, *_ in cases}) == 75
    assert all(NAMED.findall(tests) for *_, tests in cases)
    assert PAGE.count("::") == sum(len(NAMED.findall(tests)) for *_, tests in cases)


def test_every_test_on_the_page_exists() -> None:
    missing = [
        f"{file}::{name}"
        for file, name in NAMED.findall(PAGE)
        if not (TESTS / file).is_file()
        or not re.search(rf"^def {name}\(", (TESTS / file).read_text(encoding="utf-8"), re.MULTILINE)
    ]

    assert missing == []


def test_the_counts_are_those_of_the_table() -> None:
    lines = re.findall(r"^\| (refused|handled|warned) \| (\d+) \|", PAGE, re.MULTILINE)
    told = {kind: int(count) for kind, count in lines}

    assert told == Counter(outcome for *_, outcome, _ in CASE.findall(PAGE))
    assert re.search(r"^75 things", PAGE, re.MULTILINE)
