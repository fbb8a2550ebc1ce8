"""A run's hidden folder that was removed, emptied or spoilt: the next command goes on with what can be
trusted, or says in one error what to do; nothing of the user's is lost."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from itertools import product
from pathlib import Path

import pytest
import torch
from merging_cli.main import main
from safetensors.torch import load_file, save_file
from test_going_on import content, copy_of, made, run  # noqa: F401
from test_resume import METHODS, Interrupted, final, interrupt_before, spec_of, workshop  # noqa: F401

import merging
from merging.errors import CheckpointError, MergingError, OutputError
from merging.pipeline import Pipeline
from merging.report.report import Report
from merging.solved_blocks import Solved, SolvedBlocks

CHECKPOINTS = ("merged", "calibrated")
NONSENSE = bytes(range(256))
RECORDS = (
    "state.json",
    "manifest.json",
    "report-of",
    "manifest-of-merged.json",
    "manifest-of-calibrated.json",
)


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def nonsense(file: Path) -> None:
    file.write_bytes(NONSENSE)


def link(file: Path) -> None:
    """To a file of the user's."""
    precious = file.parents[2] / "precious"
    precious.write_text("precious")
    file.unlink()
    file.symlink_to(precious)


def pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def other_version(file: Path) -> None:
    text = file.read_text()
    try:
        file.write_text(json.dumps({**json.loads(text), "format": 99}))
    except ValueError:
        file.write_text("v99")


@pytest.mark.parametrize(
    ("stage", "spoil", "name"),
    [
        *product(["out"], [Path.unlink, cut, nonsense, link, pipe, other_version], RECORDS),
        *product(["half"], [Path.unlink, nonsense, link], ("state.json", "manifest-of-merged.json")),
    ],
)
def test_a_spoilt_record_is_made_anew_or_refused_and_results_stay(
    made: Path,  # noqa: F811
    tmp_path: Path,
    name: str,
    spoil: Callable[[Path], None],
    stage: str,
) -> None:
    out = copy_of(made, stage, tmp_path)
    record = out / ".merging" / name
    (out / "merged" / "mine.txt").write_text("mine")
    before, weights = content(out), out / "merged" / "model.safetensors"
    made_at = weights.stat().st_ino
    spoil(record)

    with suppress(MergingError):
        merging.verify(out)
    if name == "state.json" and spoil is not other_version:
        with pytest.raises(OutputError, match=r"state\.json, is (damaged|gone)[\s\S]*move .* away"):
            run(made, out)
        assert content(out) == before
        return
    report = run(made, out)

    assert weights.stat().st_ino == made_at
    assert (out / "merged" / "mine.txt").read_text() == "mine"
    assert report.tasks == Report.read(made / "out" / "report.json").tasks
    wanted = {**content(made / "out"), "merged/mine.txt": b"mine"}
    changing = (
        "report.json",
        *(f"{at}/{file}" for at in CHECKPOINTS for file in ("README.md", "manifest.json")),
    )
    assert {at: one for at, one in content(out).items() if at not in changing} == {
        at: one for at, one in wanted.items() if at not in changing
    }
    assert merging.verify(out).unchanged
    if name == "manifest.json" and spoil in (cut, nonsense, other_version):
        assert any(f"{record} is damaged" in one for one in report.warnings)
    if (tmp_path / "precious").exists():
        assert (tmp_path / "precious").read_text() == "precious"


@pytest.mark.parametrize("how", ["removed", "emptied"])
@pytest.mark.parametrize("stage", ["out", "half"])
def test_without_its_records_a_folder_of_results_is_refused_whole(
    made: Path,  # noqa: F811
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    stage: str,
    how: str,
) -> None:
    out = copy_of(made, stage, tmp_path)
    shutil.rmtree(out / ".merging")
    if how == "emptied":
        (out / ".merging").mkdir()
    before = content(out)

    for more in ([], ["--overwrite"]):
        for command in (["pipeline", "run"], ["drift"]):
            assert main([*command, str(made / "spec.json"), "--out", str(out), *more]) == 2
            said = capsys.readouterr().err
            assert "the record of what runs made there" in said
            assert "--overwrite" not in said
    assert content(out) == before
    assert merging.verify(out / "merged").unchanged
    for name in {path.name for path in out.iterdir()} - {".merging"}:
        shutil.move(out / name, tmp_path / f"moved-{name}")
    assert run(made, out).tasks == Report.read(made / "out" / "report.json").tasks


@pytest.mark.parametrize("kind", ["link", "file", "folder in place of a record"])
def test_a_hidden_folder_of_another_kind_is_told(made: Path, tmp_path: Path, kind: str) -> None:  # noqa: F811
    out = copy_of(made, "out", tmp_path)
    hidden = out / ".merging"
    if kind == "folder in place of a record":
        (hidden / "report-of").unlink()
        (hidden / "report-of").mkdir()
    else:
        hidden.rename(tmp_path / "elsewhere")
        if kind == "link":
            hidden.symlink_to(tmp_path / "elsewhere")
        else:
            hidden.write_text("")
    before = content(out)

    with pytest.raises(
        OutputError, match=r"\.merging is a link|expected the folder in which|expected a file"
    ):
        run(made, out)

    assert content(out) == before


@pytest.mark.parametrize("name", ["work", "begun", "report.json.tmp"])
def test_what_lies_where_a_run_works_does_not_stop_it(made: Path, tmp_path: Path, name: str) -> None:  # noqa: F811
    out = copy_of(made, "half", tmp_path)
    place = out / ".merging" / name
    if place.is_dir():
        shutil.rmtree(place)
    if name == "report.json.tmp":
        (place / "inside").mkdir(parents=True)
    else:
        place.write_text("mine")

    run(made, out)

    assert not place.exists() or place.is_dir()
    assert merging.verify(out).unchanged


def test_a_state_that_claims_files_of_the_user_is_refused(made: Path, tmp_path: Path) -> None:  # noqa: F811
    out = copy_of(made, "out", tmp_path)
    (out / "thesis.tex").write_text("mine")
    state = json.loads((out / ".merging" / "state.json").read_text())
    state |= {"owned": [*state["owned"], "thesis.tex"], "fingerprint": "other"}
    (out / ".merging" / "state.json").write_text(json.dumps(state))

    with pytest.raises(OutputError, match=r'says that a run made "thesis\.tex"'):
        run(made, out, overwrite=True)

    assert (out / "thesis.tex").read_text() == "mine"


def test_a_manifest_that_is_put_back_is_told_of(made: Path, tmp_path: Path) -> None:  # noqa: F811
    out = copy_of(made, "out", tmp_path)
    (out / "merged" / "manifest.json").unlink()

    report = run(made, out)

    assert any("its manifest was gone or damaged, and is put back" in one for one in report.warnings)


def test_a_record_of_another_version_is_told_with_what_makes_it_anew(made: Path, tmp_path: Path) -> None:  # noqa: F811
    out = copy_of(made, "out", tmp_path)
    other_version(out / ".merging" / "manifest.json")

    with pytest.raises(CheckpointError, match=r'"format" 99, expected 1[\s\S]*run the same spec again'):
        merging.verify(out)


class TestSolvedBlocks:
    """What a sweep has solved, kept for the run after a kill."""

    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        known = SolvedBlocks(tmp_path / "begun", "facts")
        for index in range(3):
            known.keep(index, Solved({"w": torch.full((4, 4), float(index))}, {"at": index}))
        assert SolvedBlocks(tmp_path / "begun", "facts").count == 3
        return tmp_path / "begun"

    def spoilt(self, folder: Path, index: int = 1) -> Path:
        return folder / f"block-{index:05}.safetensors"

    @pytest.mark.parametrize("how", ["cut", "nonsense", "a bit", "other numbers", "link", "folder", "notes"])
    def test_a_block_that_is_not_what_was_written_is_solved_again(self, folder: Path, how: str) -> None:
        from safetensors import safe_open

        file = self.spoilt(folder)
        with safe_open(file, "pt") as opened:
            about = opened.metadata()
        if how == "cut":
            cut(file)
        elif how == "nonsense":
            nonsense(file)
        elif how == "a bit":
            found = bytearray(file.read_bytes())
            found[-1] ^= 1
            file.write_bytes(found)
        elif how == "other numbers":
            save_file({"w": load_file(file)["w"] + 1}, file, about)
        elif how == "notes":
            save_file(load_file(file), file, {**about, "notes": "{}"})
        else:
            file.unlink()
            file.mkdir() if how == "folder" else file.symlink_to(self.spoilt(folder, 2))

        known = SolvedBlocks(folder, "facts")

        assert known.count == 1
        assert known.spoilt == file

    def test_blocks_of_other_facts_are_no_fault(self, folder: Path) -> None:
        known = SolvedBlocks(folder, "other facts")

        assert (known.count, known.spoilt) == (0, None)

    def test_nothing_is_written_through_a_link(self, folder: Path, tmp_path: Path) -> None:
        precious = tmp_path / "precious"
        precious.write_text("precious")
        (folder / "block-00003.tmp").symlink_to(precious)
        elsewhere = tmp_path / "elsewhere"
        elsewhere.mkdir()
        (tmp_path / "linked").symlink_to(elsewhere)
        block = Solved({"w": torch.ones(2)}, {})

        SolvedBlocks(folder, "facts").keep(3, block)
        SolvedBlocks(tmp_path / "linked", "facts").keep(0, block)

        assert precious.read_text() == "precious"
        assert not list(elsewhere.iterdir())
        assert SolvedBlocks(tmp_path / "linked", "facts").count == 1


def test_a_killed_sweep_whose_block_was_spoilt_ends_with_the_right_bytes(
    workshop: Path,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spec = spec_of(workshop, METHODS["regmean"])
    Pipeline.from_spec(spec).run(tmp_path / "whole")
    with monkeypatch.context() as patch:
        interrupt_before(patch, 2)
        with pytest.raises(Interrupted):
            Pipeline.from_spec(spec).run(tmp_path / "out")
    (block,) = (tmp_path / "out" / ".merging").rglob("block-00001.safetensors")
    found = bytearray(block.read_bytes())
    found[-1] ^= 1
    block.write_bytes(found)

    solved = interrupt_before(monkeypatch, None)
    report = Pipeline.from_spec(spec).run(tmp_path / "out")

    assert solved == [1, 2]
    assert final(tmp_path / "out") == final(tmp_path / "whole")
    assert any(f"{block} was cut or changed" in one for one in report.warnings)
