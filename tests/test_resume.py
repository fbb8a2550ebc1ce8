"""A sweep that was killed: the next run solves only what is missing, and ends with the same bytes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tiny_models import PICTURE, SIZE, expert_of, pixels

from merging.checkpoints.run_folder import RunFolder
from merging.errors import OutputError
from merging.pipeline import Pipeline
from merging.solved_blocks import Solved, SolvedBlocks
from merging.sweep import Sweep

TASKS = ("digits", "letters")
FEATCAL = {"merge": {"type": "average"}, "calibrate": {"type": "featcal", "norms": True}}
METHODS: dict[str, dict[str, Any]] = {
    "featcal": FEATCAL,
    "chain_of_merges": {"merge": {"type": "chain_of_merges"}},
    "chain_by_block": {"merge": {"type": "chain_of_merges", "chain": "block"}},
    "regmean": {"merge": {"type": "regmean"}},
    "regmean_plus_plus": {"merge": {"type": "regmean_plus_plus"}},
}
BLOCKS = SIZE["num_hidden_layers"]


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import CLIPVisionConfig, CLIPVisionModel

    folder = tmp_path_factory.mktemp("workshop")
    torch.manual_seed(0)
    base = CLIPVisionModel(CLIPVisionConfig(**SIZE, **PICTURE)).eval()
    base.save_pretrained(folder / "base")
    for seed, task in enumerate(TASKS, start=1):
        expert = CLIPVisionModel(base.config).eval()
        expert.load_state_dict(expert_of(base, seed, noise=0.05))
        expert.save_pretrained(folder / task)
        save_file(pixels(12, seed=seed), folder / f"{task}.safetensors")
    return folder


def spec_of(workshop: Path, method: dict[str, Any]) -> dict[str, Any]:
    examples = {
        task: {"type": "tensors", "path": str(workshop / f"{task}.safetensors"), "batch_size": 5}
        for task in TASKS
    }
    return {
        "base": str(workshop / "base"),
        "experts": {task: str(workshop / task) for task in TASKS},
        "tasks": {task: {"calibration": given} for task, given in examples.items()},
        "device": "cpu",
        **method,
    }


class Interrupted(Exception):
    """Stands for a kill, where a test wants to look at what happens in one process."""


def interrupt_before(monkeypatch: pytest.MonkeyPatch, block: int | None) -> list[int]:
    """Stop the sweep when it is about to solve that block; the blocks that it solved."""
    solved: list[int] = []
    true = Sweep._solve_block

    def solve(sweep: Sweep, index: int, *rest: Any) -> Any:
        if index == block:
            raise Interrupted
        solved.append(index)
        return true(sweep, index, *rest)

    monkeypatch.setattr(Sweep, "_solve_block", solve)
    return solved


def final(out: Path) -> bytes:
    stage = "calibrated" if (out / "calibrated").exists() else "merged"
    return (out / stage / "model.safetensors").read_bytes()


@pytest.mark.parametrize("method", METHODS)
def test_only_the_remaining_blocks_are_solved_and_the_result_is_the_same(
    workshop: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    spec = spec_of(workshop, METHODS[method])
    whole = Pipeline.from_spec(spec).run(tmp_path / "whole")
    with monkeypatch.context() as patch:
        interrupt_before(patch, 1)
        with pytest.raises(Interrupted):
            Pipeline.from_spec(spec).run(tmp_path / "out")

    with monkeypatch.context() as patch:
        solved = interrupt_before(patch, None)
        report = Pipeline.from_spec(spec).run(tmp_path / "out")

    assert solved == list(range(1, BLOCKS))
    assert final(tmp_path / "out") == final(tmp_path / "whole")
    assert report.solver == whole.solver
    assert report.parameters == whole.parameters
    assert not list((tmp_path / "out" / ".merging").rglob("block-*"))


@pytest.mark.parametrize("method", ["regmean", "featcal"])
def test_blocks_of_a_step_that_ended_just_before_a_kill_are_not_kept(
    workshop: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    spec = spec_of(workshop, METHODS[method])
    step = "merge" if method == "regmean" else "calibrate"
    true = RunFolder.forget

    def forget(folder: RunFolder, name: str) -> None:
        if name == step:
            raise Interrupted
        true(folder, name)

    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "forget", forget)
        with pytest.raises(Interrupted):
            Pipeline.from_spec(spec).run(tmp_path / "out")
    assert list((tmp_path / "out" / ".merging").rglob("block-*"))

    Pipeline.from_spec(spec).run(tmp_path / "out")

    assert not list((tmp_path / "out" / ".merging").rglob("block-*"))


def test_what_was_begun_from_another_spec_is_refused_with_both_values(
    workshop: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        interrupt_before(patch, 2)
        with pytest.raises(Interrupted):
            Pipeline.from_spec(spec_of(workshop, METHODS["regmean"])).run(out)
    other = spec_of(workshop, {"merge": {"type": "regmean", "shrink": 0.5}})

    with pytest.raises(OutputError, match=r"merge\.shrink: 0\.9 there, 0\.5 now"):
        Pipeline.from_spec(other).run(out)
    solved = interrupt_before(monkeypatch, None)
    Pipeline.from_spec(other).run(out, overwrite=True)

    assert solved == list(range(BLOCKS))


def test_an_expert_that_has_changed_since_is_started_from_the_first_block(
    workshop: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import shutil

    from safetensors.torch import load_file

    moved = tmp_path / "workshop"
    shutil.copytree(workshop, moved)
    with monkeypatch.context() as patch:
        interrupt_before(patch, 2)
        with pytest.raises(Interrupted):
            Pipeline.from_spec(spec_of(moved, METHODS["regmean"])).run(tmp_path / "out")
    place = moved / "digits" / "model.safetensors"
    save_file({name: one + 0.01 for name, one in load_file(place).items()}, place, {"format": "pt"})

    solved = interrupt_before(monkeypatch, None)
    Pipeline.from_spec(spec_of(moved, METHODS["regmean"])).run(tmp_path / "out")

    assert solved == list(range(BLOCKS))


def test_a_block_cut_short_on_disk_or_of_other_facts_counts_for_nothing(tmp_path: Path) -> None:
    block = Solved({"layer.weight": torch.ones(2, 2)}, {"health": {}})
    known = SolvedBlocks(tmp_path, "these")
    for index in range(3):
        known.keep(index, block)
    assert SolvedBlocks(tmp_path, "these").count == 3
    assert SolvedBlocks(tmp_path, "others").count == 0

    second = tmp_path / "block-00001.safetensors"
    second.write_bytes(second.read_bytes()[:-3])

    assert SolvedBlocks(tmp_path, "these").count == 1


FORGE = """
import json, os, signal, sys
import torch
torch.set_num_threads(1)  # so that no thread is lost in a fork
from merging.pipeline import Pipeline

def run(spec, out, left):
    if child := os.fork():
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    signs = 0
    def progress(stage, done, total):
        nonlocal signs
        signs += stage == "sweep"
        if signs == left:
            os.kill(os.getpid(), signal.SIGKILL)
    code = 1
    try:
        Pipeline.from_spec(spec).run(out, progress=progress)
        code = 0
    finally:
        os._exit(code)

found = []
for spec, out, kills in json.loads(sys.argv[1]):
    Pipeline.from_spec(spec).run(out + "-whole")  # here, so that no child has to import anything
    found.append([run(spec, out, kill) for kill in kills])
print(json.dumps(found))
"""


def forged(workshop: Path, tmp_path: Path, kills: dict[str, list[int | None]]) -> dict[str, list[int]]:
    """Exit codes of runs of each method, one after the other in one folder, each killed by itself at so many
    signs of progress; compares what is left with an undisturbed run."""
    asked = [
        (spec_of(workshop, METHODS[method]), str(tmp_path / method), signs) for method, signs in kills.items()
    ]
    command = [sys.executable, "-c", FORGE, json.dumps(asked)]
    forge = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert forge.returncode == 0, forge.stderr
    for method in kills:
        assert final(tmp_path / method) == final(tmp_path / f"{method}-whole")
    return dict(zip(kills, json.loads(forge.stdout), strict=True))


def test_a_run_killed_again_and_again_ends_with_the_same_bytes(workshop: Path, tmp_path: Path) -> None:
    # Within the first block, within a later one, and once while blocks are recalled.
    kills = {"featcal": [2, 4, 3, None], "chain_of_merges": [2, 9, 3, None]}

    codes = forged(workshop, tmp_path, kills)

    assert set(map(tuple, codes.values())) == {(-9, -9, -9, 0)}


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_a_run_killed_at_random_moments_ends_with_the_same_bytes(
    workshop: Path, tmp_path: Path, seed: int
) -> None:
    random = torch.Generator().manual_seed(seed)
    kills = {method: [*torch.randint(1, 12, (4,), generator=random).tolist(), None] for method in METHODS}

    codes = forged(workshop, tmp_path, kills)

    assert all(each[-1] == 0 for each in codes.values())
