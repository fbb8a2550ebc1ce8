"""One report with everything in it."""

from __future__ import annotations

import pytest

from merging.evaluation.drift import BlockDrift, ModelDrift, OutputDrift
from merging.report.drift import DriftReport
from merging.report.report import Report, StageReport
from merging.report.scores import TaskReport
from merging.report.solver import ParameterFate, SolverRow


def _blocks(distance):
    rows = tuple(BlockDrift(f"layers.{i}", 0.9, distance * (i + 1), 17) for i in range(3))
    return ModelDrift(rows, OutputDrift((0.9, 0.9), (distance, distance)))


def _solve(module, **changes):
    healthy = {"features": 64, "tokens": 640, "condition": 1e3, "ridge": 0.05, "residual": 1e-12}
    return SolverRow(module=module, block="layers.0", **{**healthy, **changes})


@pytest.fixture
def report():
    tasks = {
        "mnist": TaskReport.of(base=0.1, expert=0.9, merged=0.5, calibrated=0.8, test_examples=500),
        "svhn": TaskReport.of(base=0.2, expert=0.8, merged=0.4, calibrated=0.6, test_examples=100),
    }
    measured = {task: {"merged": _blocks(0.2), "calibrated": _blocks(0.1)} for task in tasks}
    return Report.of(
        tasks=tasks,
        spec={"base": "models/base", "merge": {"type": "ties"}},
        versions={"torch": "2.4"},
        seed=3,
        experts={"mnist": "models/mnist", "svhn": "models/svhn"},
        drift=DriftReport.of(measured, examples=64),
        solver=(_solve("layers.0.fc1"), _solve("layers.0.fc2", condition=float("inf"))),
        parameters={
            "fc1.weight": ParameterFate(state="solved"),
            "embedding": ParameterFate(state="merged", reason="outside the blocks"),
            "position_ids": ParameterFate(state="copied", reason="not floating point"),
        },
        stages=(StageReport(name="merge", seconds=1.5, peak_bytes=2**30),),
        checkpoint="out/calibrated",
    )


@pytest.fixture
def solve():
    return _solve
