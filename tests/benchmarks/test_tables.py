"""Every table, at a toy size."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.__main__ import main
from benchmarks.paced import Pace
from benchmarks.tables import TABLES

Table = Callable[..., str]


def test_help_names_every_table(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])

    said = capsys.readouterr().out

    assert all(name in said for name in ("inputs", *TABLES))


def test_merging_equals_the_exact_rules(table: Table) -> None:
    said = table("merge", "--methods", "average", "ties")

    assert said.count("0.00 % differ") == 2
    assert said.count("read + write + import torch") == 2
    assert "TOY INPUTS" in said


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["task_arithmetic", "slerp", "model_stock"])
def test_every_rule_equals_the_exact_one(table: Table, rule: str) -> None:
    assert "0.00 % differ" in table("merge", "--methods", rule)


def test_random_rules_are_timed_and_not_compared(table: Table) -> None:
    said = table("merge", "--methods", "dare_ties")

    assert "merging, again, norms matched" in said
    assert "%" not in said.split("| **`dare_ties`**")[1].split("\n\n")[0]


def test_rules_for_vision_models(table: Table) -> None:
    said = table("vision", "--methods", "iso_c", "wudi")

    assert "| **`iso_c`** |" in said
    assert "| 2 steps |" in said


def test_calibration_is_compared_with_its_floor(table: Table) -> None:
    said = table("calibrate", "--examples", "8", "--methods", "featcal", "chain_of_merges")

    assert "`featcal`, n = 8" in said
    assert "`chain_of_merges`, n = 8" in said
    assert "stage / floor" in said
    floor, stage, ratio = (float(cell) for cell in _cells(said, "`featcal`, n = 8")[-3:])
    assert stage > 0
    assert ratio == pytest.approx(stage / floor, rel=0.05)


def _cells(said: str, first: str) -> list[str]:
    """Of the last row of that name."""
    row = [line for line in said.splitlines() if line.startswith(f"| {first} |")][-1]
    return [cell.strip() for cell in row.strip("|").split("|")]


def test_the_rate_over_a_run_is_that_of_its_stretches() -> None:
    pace = Pace(toy=True, rates=[(0.0, 100.0), (1.0, 200.0), (3.0, 100.0)])

    assert pace.rate() == pytest.approx(150.0)
    assert Pace(toy=True, rates=[(0.0, 70.0)]).rate() == 70.0
    uneven = Pace(toy=True, rates=[(0.0, 100.0), (1.0, 100.0), (3.0, 200.0)])
    assert uneven.rate() == pytest.approx((100.0 + 3 * 150.0) / 4)


@pytest.mark.slow
def test_both_regmeans_are_compared_with_their_floors(table: Table) -> None:
    said = table("calibrate", "--examples", "8", "--methods", "regmean", "regmean_plus_plus")

    assert "`regmean_plus_plus`, n = 8" in said


def test_adapters_are_combined_exactly_at_the_sum_of_their_ranks(table: Table) -> None:
    said = table("lora")
    errors = [float(part.split()[0]) for part in said.split("error ")[1:] if part[0].isdigit()]

    assert errors[0] < 1e-6
    assert 0.1 < errors[1] < 1


def test_growth_leaves_a_plot_beside_the_page(table: Table, tmp_path: Path) -> None:
    page = tmp_path / "docs" / "benchmarks.md"

    table("growth", "--only", "ties", "--write", str(page))

    text = page.read_text(encoding="utf-8")
    assert "| ties, GB a model |" in text
    assert "](growth.svg)" in text
    assert (page.parent / "growth.svg").read_text(encoding="utf-8").startswith("<svg")


@pytest.mark.slow
def test_growth_of_featcal(table: Table) -> None:
    said = table("growth", "--only", "featcal")

    assert "| featcal, samples | 4: " in said
    assert "| featcal, depth | 1: " in said


def test_peak_is_compared_with_the_plan(table: Table) -> None:
    said = table("peak", "--blocks", "1")

    assert "| 1 blocks |" in said
    assert "| 32 blocks, extrapolated |" in said


def test_several_processes_are_compared_with_one(table: Table) -> None:
    said = table("two_processes", "--methods", "task_arithmetic", "--processes", "1")

    assert "torchrun, 1 processes" in said
    assert "largest difference 0" in said
