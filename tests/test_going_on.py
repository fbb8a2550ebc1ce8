"""Going on in a folder whose files were changed, moved or removed since the last run."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from merging_cli.main import main
from safetensors.torch import load_file, save_file
from tiny_models import PICTURE, SIZE, expert_of, pixels

import merging
from merging.checkpoints import changed_results
from merging.checkpoints.hashing import FileHashes
from merging.errors import OutputError
from merging.pipeline import Pipeline
from merging.report.report import Report

TASKS = ("digits", "letters")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A spec with heads and a correction per task, its run in out/, and one until the merge in half/."""
    from transformers import CLIPVisionConfig, CLIPVisionModel

    folder = tmp_path_factory.mktemp("made")
    torch.manual_seed(0)
    base = CLIPVisionModel(CLIPVisionConfig(**{**SIZE, "num_hidden_layers": 1}, **PICTURE)).eval()
    base.save_pretrained(folder / "base")
    tasks: dict[str, Any] = {}
    for seed, task in enumerate(TASKS, start=1):
        expert = CLIPVisionModel(base.config).eval()
        expert.load_state_dict(expert_of(base, seed, noise=0.05))
        expert.save_pretrained(folder / task)
        save_file(pixels(8, seed=seed), folder / f"{task}-calibration.safetensors")
        labels = torch.arange(8) % 5
        save_file({**pixels(8, seed=9 + seed), "labels": labels}, folder / f"{task}-test.safetensors")
        weight = torch.randn(5, 32, generator=torch.Generator().manual_seed(seed))
        save_file({"weight": weight}, folder / f"{task}-head.safetensors")
        tasks[task] = {
            "calibration": {"type": "tensors", "path": f"{task}-calibration.safetensors"},
            "test": {"type": "tensors", "path": f"{task}-test.safetensors"},
            "head": {"type": "linear", "path": f"{task}-head.safetensors"},
        }
    spec = {
        "base": "base",
        "experts": {task: task for task in TASKS},
        "merge": "average",
        "calibrate": {"type": "surgery", "iterations": 2},
        "tasks": tasks,
        "device": "cpu",
    }
    (folder / "spec.json").write_text(json.dumps(spec))
    Pipeline.from_spec(folder / "spec.json").run(folder / "out")
    Pipeline.from_spec(folder / "spec.json").run(folder / "half", until="merge")
    return folder


def copy_of(made: Path, name: str, place: Path) -> Path:
    shutil.copytree(made / name, place / name)
    return place / name


def run(made: Path, out: Path, **how: Any) -> Report:
    return Pipeline.from_spec(made / "spec.json").run(out, **how)


def content(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and ".merging" not in path.parts
    }


def flip(file: Path) -> None:
    found = bytearray(file.read_bytes())
    found[-1] ^= 1
    file.write_bytes(found)


def swap(file: Path) -> None:
    """Put other weights of the same names, shapes and length in its place."""
    save_file({name: one + 1 for name, one in load_file(file).items()}, file, {"format": "pt"})


def test_nothing_is_calibrated_from_weights_that_others_put_into_merged(made: Path, tmp_path: Path) -> None:
    out = copy_of(made, "half", tmp_path)
    weights = out / "merged" / "model.safetensors"
    before = weights.read_bytes()
    swap(weights)
    assert len(weights.read_bytes()) == len(before)
    foreign = weights.read_bytes()

    with pytest.raises(OutputError) as caught:
        run(made, out)

    recorded = json.loads((out / "merged" / "manifest.json").read_text())["sha256"]["model.safetensors"]
    for part in (str(weights), recorded, "--overwrite", "move these files away"):
        assert part in str(caught.value)
    assert not (out / "calibrated").exists()
    assert weights.read_bytes() == foreign
    weights.rename(tmp_path / "kept.safetensors")
    run(made, out)
    assert weights.read_bytes() == before
    assert merging.verify(out).unchanged


@pytest.mark.parametrize("stage", ["merged", "calibrated"])
def test_a_byte_that_was_flipped_in_a_finished_run_is_found(made: Path, tmp_path: Path, stage: str) -> None:
    out = copy_of(made, "out", tmp_path)
    weights = out / stage / "model.safetensors"
    before = weights.read_bytes()
    flip(weights)

    with pytest.raises(OutputError, match=f"{stage} is finished, but is not what the run wrote"):
        run(made, out)
    run(made, out, overwrite=True)

    assert weights.read_bytes() == before
    assert merging.verify(out).unchanged


def longer_config(folder: Path) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "note": "mine"}))


def half_weights(folder: Path) -> None:
    file = folder / "model.safetensors"
    save_file({name: one.half() for name, one in load_file(file).items()}, file, {"format": "pt"})


def pointer(folder: Path) -> None:
    (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n")


def longer_config_and_no_weights(folder: Path) -> None:
    longer_config(folder)
    (folder / "model.safetensors").unlink()


@pytest.mark.parametrize("change", [longer_config, half_weights, pointer, longer_config_and_no_weights])
@pytest.mark.parametrize("stage", ["merged", "calibrated"])
def test_what_was_changed_to_another_size_is_not_written_over(
    made: Path, tmp_path: Path, stage: str, change: Callable[[Path], None]
) -> None:
    out = copy_of(made, "out", tmp_path)
    first = content(out)
    change(out / stage)
    before = content(out)

    with pytest.raises(OutputError, match=f"{stage} is finished, but is not what the run wrote"):
        run(made, out)
    assert content(out) == before
    run(made, out, overwrite=True)

    weights = [name for name in first if name.endswith((".safetensors", "config.json"))]
    assert {name: content(out)[name] for name in weights} == {name: first[name] for name in weights}


def test_a_model_card_may_be_edited_and_nothing_is_read_twice(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = copy_of(made, "out", tmp_path)
    card = out / "merged" / "README.md"
    card.write_text(card.read_text() + "mine\n")
    before = content(out)
    monkeypatch.setenv("MERGING_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("merging.checkpoints.hashing._FRESH", -1e9)
    read: list[Path] = []
    true = FileHashes.of

    def of(known: FileHashes, path: Path, *rest: Any) -> str:
        if known.recalled(path) is None:
            read.append(path)
        return true(known, path, *rest)

    monkeypatch.setattr(changed_results.FileHashes, "of", of)
    run(made, out)
    assert [path for path in read if path.is_relative_to(out)]
    read.clear()
    run(made, out)

    assert read == []
    moved = {name: now for name, now in content(out).items() if name != "report.json"}
    assert moved == {name: then for name, then in before.items() if name != "report.json"}


def test_a_folder_that_was_moved_tells_where_its_checkpoint_is_now(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = copy_of(made, "out", tmp_path)

    assert main(["pipeline", "run", str(made / "spec.json"), "--out", str(out)]) == 0

    assert capsys.readouterr().out.splitlines()[-1].endswith(str(out / "calibrated"))
    assert Report.read(out / "report.json").checkpoint == str(out / "calibrated")
    assert merging.verify(out).unchanged


@pytest.mark.parametrize(
    "text", ["{}", "", '{"format": 1, "spec"', None], ids=["{}", "empty", "cut", "edited"]
)
def test_a_report_that_is_not_the_runs_is_made_anew(made: Path, tmp_path: Path, text: str | None) -> None:
    out = copy_of(made, "out", tmp_path)
    place, weights = out / "report.json", out / "calibrated" / "model.safetensors"
    before, made_at = Report.read(place), weights.stat().st_ino
    place.write_text(place.read_text().replace('"seed": 0', '"seed": 7') if text is None else text)

    report = run(made, out)

    assert report == Report.read(place)
    assert report.seed == 0
    assert report.tasks == before.tasks
    assert any("report.json was not what the run recorded" in warning for warning in report.warnings)
    assert weights.stat().st_ino == made_at
    assert merging.verify(out).unchanged


@pytest.mark.parametrize("whole", [True, False], ids=["all heads", "one head"])
def test_heads_that_were_removed_are_made_again(made: Path, tmp_path: Path, whole: bool) -> None:
    out = copy_of(made, "out", tmp_path)
    before, weights = content(out / "heads"), out / "merged" / "model.safetensors"
    made_at = weights.stat().st_ino
    assert len(before) == 2 * len(TASKS)  # a head and a correction each
    if whole:
        shutil.rmtree(out / "heads")
    else:
        (out / "heads" / "digits.safetensors").unlink()

    report = run(made, out)

    assert content(out / "heads") == before
    assert report.tasks == Report.read(made / "out" / "report.json").tasks
    assert weights.stat().st_ino == made_at
    assert merging.verify(out).unchanged


@pytest.mark.parametrize("text", ["{", "", "{}"])
@pytest.mark.parametrize("stage", ["merged", "calibrated"])
def test_a_manifest_that_was_damaged_is_put_back(made: Path, tmp_path: Path, stage: str, text: str) -> None:
    out = copy_of(made, "out", tmp_path)
    manifest, weights = out / stage / "manifest.json", out / stage / "model.safetensors"
    before, made_at = manifest.read_bytes(), weights.stat().st_ino
    manifest.write_text(text)

    run(made, out)

    assert manifest.read_bytes() == before
    assert weights.stat().st_ino == made_at
    assert merging.verify(out).unchanged


def test_a_damaged_manifest_is_not_put_back_beside_files_of_others(made: Path, tmp_path: Path) -> None:
    out = copy_of(made, "out", tmp_path)
    (out / "merged" / "manifest.json").write_text("{")
    weights = out / "merged" / "model.safetensors"
    swap(weights)
    foreign = weights.read_bytes()

    with pytest.raises(OutputError, match=r"nothing tells a run.s files from yours"):
        run(made, out)

    assert weights.read_bytes() == foreign
    assert (out / "merged" / "manifest.json").read_text() == "{"
