"""`memory`: what a run chooses to keep to it, and when it is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import PICTURE, SIZE, expert_of, pixels

from merging.costs.budget import USUAL_CHOICE, choose, rebatch_
from merging.costs.steps import Steps
from merging.errors import SpecError
from merging.pipeline import Pipeline
from merging.spec.pipeline_spec import PipelineSpec

GIB = 1 << 30


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import CLIPVisionConfig, CLIPVisionModel

    folder = tmp_path_factory.mktemp("workshop")
    torch.manual_seed(0)
    base = CLIPVisionModel(CLIPVisionConfig(**SIZE, **PICTURE)).eval()
    base.save_pretrained(folder / "base")
    for seed, task in enumerate(("one", "two"), start=1):
        expert = CLIPVisionModel(base.config).eval()
        expert.load_state_dict(expert_of(base, seed, noise=0.05))
        expert.save_pretrained(folder / task)
        save_file(pixels(70, seed=seed), folder / f"{task}.safetensors")
    return folder


def pipeline_of(workshop: Path, *, batch_size: int | None = None, **changes: Any) -> Pipeline:
    more = {} if batch_size is None else {"batch_size": batch_size}
    tasks = {
        task: {"calibration": {"type": "tensors", "path": str(workshop / f"{task}.safetensors"), **more}}
        for task in ("one", "two")
    }
    spec = {
        "base": str(workshop / "base"),
        "experts": {task: str(workshop / task) for task in tasks},
        "merge": {"type": "average"},
        "calibrate": {"type": "featcal"},
        "tasks": tasks,
        "device": "cpu",
    }
    return Pipeline.from_spec({**spec, **changes})


def steps_of(pipeline: Pipeline) -> Steps:
    return Steps(pipeline.spec, pipeline.resolve(), pipeline.tasks())


def peak(steps: Steps, choice: Any) -> float:
    return max(step.cost.memory for step in steps.costs(choice))


def test_without_memory_nothing_is_chosen(workshop: Path) -> None:
    pipeline = pipeline_of(workshop)

    assert pipeline.choice() == USUAL_CHOICE
    assert pipeline.plan().limits == {}


def test_with_much_memory_batches_are_as_large_as_the_data(workshop: Path) -> None:
    steps = steps_of(pipeline_of(workshop))

    choice = choose(steps, 64 * GIB, 0)

    assert choice.batch == 128
    assert choice.limits.row_block is None


def test_with_less_memory_batches_are_smaller_and_the_law_is_kept(workshop: Path) -> None:
    steps = steps_of(pipeline_of(workshop, merge={"type": "checkpoint", "model": str(workshop / "one")}))
    found = []

    for room in (64.0, 60.0, 58.0, 57.0):
        memory = int(room * (1 << 20))
        choice = choose(steps, memory, 0)
        found.append((choice.batch, choice.limits.activation_memory))
        assert peak(steps, choice) <= memory

    assert found == sorted(found, reverse=True)
    assert found[0] > found[-1]


def test_row_blocks_and_threads_follow_the_memory(workshop: Path) -> None:
    changes = {"merge": {"type": "task_arithmetic"}, "calibrate": [], "tasks": {}}
    steps = steps_of(pipeline_of(workshop, **changes))
    usual = peak(steps, USUAL_CHOICE)

    choice = choose(steps, int(0.7 * 1.15 * usual), 0)

    assert choice.limits.row_block is not None
    assert choice.limits.row_block < steps.usual_row_block
    assert peak(steps, choice) <= 0.7 * usual


def test_a_batch_size_that_was_asked_for_is_kept(workshop: Path) -> None:
    pipeline = pipeline_of(workshop, batch_size=7, memory="64GiB")

    choice = pipeline.choice()
    rebatch_(pipeline.tasks(), 128)

    assert choice.batch is None
    assert {len(batch["pixel_values"]) for batch in pipeline.tasks()["one"].calibration.batches()} == {7}


def test_too_little_memory_is_refused_with_what_each_step_needs(workshop: Path, tmp_path: Path) -> None:
    pipeline = pipeline_of(workshop, memory="100MB")

    for attempt in (pipeline.validate, pipeline.plan, lambda: pipeline.run(tmp_path / "out")):
        with pytest.raises(SpecError, match=r'"memory" is 0\.09 GiB[\s\S]*calibrate \(featcal\).*needs'):
            attempt()
    assert not (tmp_path / "out").exists()


def test_a_run_with_memory_gives_the_same_result(workshop: Path, tmp_path: Path) -> None:
    pipeline_of(workshop).run(tmp_path / "usual")

    report = pipeline_of(workshop, memory="64GiB").run(tmp_path / "limited")

    usual, limited = (
        load_file(tmp_path / name / "calibrated" / "model.safetensors") for name in ("usual", "limited")
    )
    assert max(float((limited[name] - usual[name]).abs().max()) for name in usual) < 1e-5
    assert max(stage.peak_bytes for stage in report.stages) < 64 * GIB


def test_more_memory_does_not_make_another_run_of_it(workshop: Path, tmp_path: Path) -> None:
    pipeline_of(workshop, memory="32GiB").run(tmp_path / "out")
    before = (tmp_path / "out" / "calibrated" / "model.safetensors").stat().st_mtime_ns

    pipeline_of(workshop, memory="64GiB").run(tmp_path / "out")

    assert (tmp_path / "out" / "calibrated" / "model.safetensors").stat().st_mtime_ns == before


def test_a_plan_tells_memory_disk_examples_and_seconds(workshop: Path) -> None:
    plan = pipeline_of(workshop, memory="64GiB").plan()

    calibrate = plan.steps[1]
    assert plan.memory_bytes == 64 * GIB
    assert plan.limits["batch"] == 128
    assert (calibrate.examples, calibrate.batch) == (140, 70)
    assert plan.start_bytes < calibrate.peak_bytes <= plan.peak_bytes
    assert calibrate.scratch_bytes == plan.scratch_bytes > 0
    assert plan.seconds is not None
    assert plan.seconds >= calibrate.seconds > 0
    assert json.loads(plan.model_dump_json())["steps"][1]["scratch_bytes"] > 0


def test_memory_is_a_size_in_the_spec_and_the_schema() -> None:
    from merging.spec import parse_spec
    from merging.spec.schema import schema

    spec: PipelineSpec = parse_spec(
        {"base": "a/b", "merge": {"type": "checkpoint", "model": "a/c"}, "memory": "8GiB"}, Path.cwd(), "x"
    )

    assert spec.memory == 8 * GIB
    assert "memory" not in spec.canonical()
    assert schema()["properties"]["memory"]["type"] == ["integer", "string"]
    with pytest.raises(SpecError, match=r'memory: found the text "lots", expected bytes'):
        parse_spec({"base": "a/b", "merge": "average", "memory": "lots"}, Path.cwd(), "x")
