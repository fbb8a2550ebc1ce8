"""Which commands measured a folder's records, and for how long."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.suites import stamps
from benchmarks.suites.stamps import stamped


def test_a_command_is_told_once_with_the_seconds_of_all_its_calls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter((0.0, 100.0, 1000.0, 1080.0, 2000.0, 2000.0))
    monkeypatch.setattr(stamps.time, "monotonic", lambda: next(clock))
    measured = tmp_path / "measured" / "tiny"
    measured.mkdir(parents=True)
    words = ["measure", str(tmp_path / "suites/tiny/spec.json"), "--out", str(measured)]

    with pytest.raises(KeyboardInterrupt), stamped(measured, words):
        raise KeyboardInterrupt
    with stamped(measured, words):
        pass
    with stamped(measured, [*words, "--only", "seeds"]):
        begun = stamps.stamps(measured)[-1].told  # it is not over yet

    once, seeds = stamps.stamps(measured)
    assert once.told == (
        "python -m benchmarks.suites measure suites/tiny/spec.json --out measured/tiny  # 3 min"
    )
    assert begun.endswith("--only seeds")
    assert seeds.seconds == 0.0
