"""What lies in a run's folder and is not what it wrote: weights beside its own, changed heads, things of
another kind, lost records; and inputs that were changed without deciding a checkpoint."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from merging_cli.main import main
from safetensors.torch import load_file, save_file
from test_going_on import content, copy_of, flip, made, run  # noqa: F401

import merging
from merging.errors import CheckpointError, OutputError
from merging.making import open_result
from merging.pipeline import Pipeline
from merging.report.report import Report

SHARD = "model-00001-of-00001.safetensors"
INDEX = "model.safetensors.index.json"


def pair(folder: Path) -> None:
    """Other weights, and the index by which they are read."""
    weights = {name: one + 1 for name, one in load_file(folder / "model.safetensors").items()}
    save_file(weights, folder / SHARD, {"format": "pt"})
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": dict.fromkeys(weights, SHARD)}))


def empty_index(folder: Path) -> None:
    (folder / INDEX).write_text("{}")


def other_file(folder: Path) -> None:
    save_file({"w": torch.ones(2)}, folder / "other.safetensors")


def adapter(folder: Path) -> None:
    (folder / "adapter_config.json").write_text("{}")


def dangling(folder: Path) -> None:
    (folder / INDEX).symlink_to(folder / "nowhere")


STRAYS: dict[Callable[[Path], None], tuple[str, ...]] = {
    pair: (INDEX, SHARD),
    empty_index: (INDEX,),
    other_file: ("other.safetensors",),
    adapter: ("adapter_config.json",),
    dangling: (INDEX,),
}


def records(out: Path) -> dict[str, bytes]:
    names = ("state.json", "manifest.json", "report-of")
    return {name: (out / ".merging" / name).read_bytes() for name in names}


class TestWeightsBesideTheResults:
    @pytest.mark.parametrize("put", STRAYS)
    def test_nothing_is_calibrated_from_them(
        self,
        made: Path,  # noqa: F811
        tmp_path: Path,
        put: Callable[[Path], None],
    ) -> None:
        out = copy_of(made, "half", tmp_path)
        put(out / "merged")
        before, kept = content(out), records(out)

        with pytest.raises(OutputError, match="weights were put beside its own") as caught:
            run(made, out)

        assert caught.value.exit_code == 2
        assert all(str(out / "merged" / name) in str(caught.value) for name in STRAYS[put])
        assert (content(out), records(out)) == (before, kept)
        for name in STRAYS[put]:
            (out / "merged" / name).rename(tmp_path / name)
        run(made, out)
        weights = "calibrated/model.safetensors"
        assert (out / weights).read_bytes() == (made / "out" / weights).read_bytes()

    @pytest.mark.parametrize("put", [pair, empty_index])
    def test_nothing_is_measured_on_them(
        self,
        made: Path,  # noqa: F811
        tmp_path: Path,
        put: Callable[[Path], None],
    ) -> None:
        out = copy_of(made, "out", tmp_path)
        put(out / "calibrated")
        (out / "report.json").unlink()

        with pytest.raises(OutputError, match=r"calibrated is finished, but .* beside its own"):
            run(made, out)

        assert not (out / "report.json").exists()

    @pytest.mark.parametrize("put", STRAYS)
    def test_verify_lists_them(
        self,
        made: Path,  # noqa: F811
        tmp_path: Path,
        capsys: pytest.CaptureFixture[str],
        put: Callable[[Path], None],
    ) -> None:
        out = copy_of(made, "out", tmp_path)
        put(out / "calibrated")

        for folder in (out, out / "calibrated"):
            found = merging.verify(folder)
            added = [file.file for group in found.groups for file in group.files if file.state == "added"]
            assert sorted(added) == sorted(STRAYS[put])
            assert not found.unchanged
        assert main(["verify", str(out)]) == 1
        assert f"{len(STRAYS[put])} added" in capsys.readouterr().out

    @pytest.mark.parametrize("put", [pair, empty_index, other_file])
    def test_with_overwrite_they_are_moved_out_of_the_way_and_told_of(
        self,
        made: Path,  # noqa: F811
        tmp_path: Path,
        put: Callable[[Path], None],
    ) -> None:
        out = copy_of(made, "out", tmp_path)
        put(out / "merged")
        theirs = {name: (out / "merged" / name).read_bytes() for name in STRAYS[put]}

        report = run(made, out, overwrite=True)

        assert {name: (out / "merged" / "yours-1" / name).read_bytes() for name in theirs} == theirs
        assert any("would be read as weights of the model" in one for one in report.warnings)
        for stage in ("merged", "calibrated"):
            weights = f"{stage}/model.safetensors"
            assert (out / weights).read_bytes() == (made / "out" / weights).read_bytes()
        assert report.tasks == Report.read(made / "out" / "report.json").tasks
        assert merging.verify(out).unchanged

    def test_those_that_appear_while_a_run_works_are_not_opened(self, made: Path, tmp_path: Path) -> None:  # noqa: F811
        out = copy_of(made, "out", tmp_path)
        pair(out / "merged")

        with pytest.raises(OutputError, match="beside its own"):
            open_result(out / "merged", Pipeline.from_spec(made / "spec.json").resolve())

    @pytest.mark.parametrize(
        "name",
        ["notes.txt", "model-q4.gguf", "pytorch_model.bin", "training_args.bin", "._model.safetensors"],
    )
    def test_what_nobody_reads_as_the_model_may_lie_there(
        self,
        made: Path,  # noqa: F811
        tmp_path: Path,
        name: str,
    ) -> None:
        out = copy_of(made, "half", tmp_path)
        (out / "merged" / name).write_bytes(b"mine")

        run(made, out)

        assert (out / "merged" / name).read_bytes() == b"mine"
        assert merging.verify(out).unchanged


class TestInputsThatChangedAndDecideNoCheckpoint:
    @pytest.fixture
    def own(self, made: Path, tmp_path: Path) -> Path:  # noqa: F811
        """All of it, so that inputs may be changed; its run in out/, done here."""
        own = tmp_path / "own"
        shutil.copytree(made, own, ignore=shutil.ignore_patterns("out", "half"))
        run(own, own / "out")
        assert merging.verify(own / "out").unchanged
        return own

    @pytest.mark.parametrize("until", [None, "merge"])
    def test_another_head_is_recorded(self, own: Path, until: str | None) -> None:
        out, head = own / "out", own / "digits-head.safetensors"
        made_at = (out / "calibrated" / "model.safetensors").stat().st_ino
        save_file({"weight": load_file(head)["weight"].flip(0), "bias": torch.ones(5)}, head)
        assert not merging.verify(out).unchanged

        run(own, out, until=until)

        assert merging.verify(out).unchanged
        for stage in ("merged", "calibrated"):
            about = json.loads((out / stage / "manifest.json").read_text())
            assert about["notes"]["heads"]["digits"]["bias"] == [5]
        assert torch.equal(load_file(out / "heads" / "digits.safetensors")["bias"], torch.ones(5))
        assert (out / "calibrated" / "model.safetensors").stat().st_ino == made_at
        run(own, out)
        assert merging.verify(out).unchanged

    @pytest.mark.parametrize("name", ["digits-calibration", "digits-test", "digits-head"])
    def test_a_file_of_the_same_examples_is_recorded(self, own: Path, name: str) -> None:
        out, file = own / "out", own / f"{name}.safetensors"
        made_at = (out / "merged" / "model.safetensors").stat().st_ino
        save_file(load_file(file), file, {"written": "again"})
        assert not merging.verify(out).unchanged

        run(own, out)

        assert merging.verify(out).unchanged
        assert (out / "merged" / "model.safetensors").stat().st_ino == made_at


class TestHeads:
    @pytest.mark.parametrize("how", ["a bit", "a link"])
    @pytest.mark.parametrize("which", [0, 1], ids=["head", "correction"])
    def test_one_that_is_not_what_the_run_wrote_is_refused_and_made_again(
        self,
        made: Path,  # noqa: F811
        tmp_path: Path,
        which: int,
        how: str,
    ) -> None:
        out = copy_of(made, "out", tmp_path)
        head = sorted((out / "heads").glob("digits*"), key=lambda file: len(file.name))[which]
        before, precious = head.read_bytes(), tmp_path / "precious.safetensors"
        if how == "a link":
            head.rename(precious)
            head.symlink_to(precious)
        flip(head)
        kept, theirs = records(out), precious.read_bytes() if how == "a link" else b""

        with pytest.raises(OutputError, match="heads is finished, but is not what the run wrote") as caught:
            run(made, out)
        assert str(head) in str(caught.value)
        assert records(out) == kept
        report = run(made, out, overwrite=True)

        assert head.read_bytes() == before
        assert not head.is_symlink()
        assert how != "a link" or precious.read_bytes() == theirs
        assert report.tasks == Report.read(made / "out" / "report.json").tasks
        assert merging.verify(out).unchanged

    def test_a_correction_is_known_by_its_checkpoint_where_the_run_did_not_end(
        self,
        made: Path,  # noqa: F811
        tmp_path: Path,
    ) -> None:
        out = copy_of(made, "out", tmp_path)
        (out / ".merging" / "manifest.json").unlink()
        correction = max((out / "heads").glob("digits*"), key=lambda file: len(file.name))
        before = correction.read_bytes()
        flip(correction)

        with pytest.raises(OutputError, match="heads is finished, but is not what the run wrote"):
            run(made, out)
        run(made, out, overwrite=True)

        assert correction.read_bytes() == before
        assert merging.verify(out).unchanged


class TestRecordsThatAreGone:
    @pytest.mark.parametrize("copy", ["[1]", None], ids=["damaged copy", "no copy"])
    @pytest.mark.parametrize("other", [False, True], ids=["the same spec", "another spec"])
    def test_a_run_that_is_refused_leaves_what_is_left(
        self,
        made: Path,  # noqa: F811
        tmp_path: Path,
        copy: str | None,
        other: bool,
    ) -> None:
        out = copy_of(made, "out", tmp_path)
        place = out / ".merging" / "manifest-of-merged.json"
        (out / "merged" / "manifest.json").unlink()
        if copy is None:
            place.unlink()
        else:
            place.write_text(copy)
            with pytest.raises(CheckpointError, match=f"move {out / 'merged'} away, then run the same spec"):
                merging.verify(out)
        before, kept = content(out), records(out)
        again = Pipeline.from_spec(made / "spec.json", sets=["seed=1"] if other else [])

        with pytest.raises(OutputError, match=f"nothing tells .* yours\n .*move {out / 'merged'} away"):
            again.run(out, overwrite=other)

        assert (content(out), records(out)) == (before, kept)
        (out / "merged").rename(tmp_path / "moved")
        again.run(out, overwrite=other)
        assert merging.verify(out).unchanged

    def test_verify_still_finds_what_is_missing_when_all_manifests_are_gone(
        self,
        made: Path,  # noqa: F811
        tmp_path: Path,
    ) -> None:
        out = copy_of(made, "out", tmp_path)
        for stage in ("merged", "calibrated"):
            (out / stage / "manifest.json").unlink()
            (out / ".merging" / f"manifest-of-{stage}.json").unlink()
        with pytest.raises(OutputError):
            run(made, out)

        found = merging.verify(out)

        missing = {file.file for group in found.groups for file in group.differing}
        assert missing == {"merged/manifest.json", "calibrated/manifest.json"}


class TestThingsOfAnotherKind:
    @pytest.mark.parametrize(
        "name", ["report.json", "heads", "heads/digits.safetensors", "heads out", "heads ring"]
    )
    def test_where_a_run_writes_they_are_refused_before_the_work(
        self,
        made: Path,  # noqa: F811
        tmp_path: Path,
        name: str,
    ) -> None:
        out = copy_of(made, "out", tmp_path)
        place = out / name.split()[0]
        if place.is_dir():
            shutil.move(place, tmp_path / "moved")
        else:
            place.unlink()
        if name == "heads":
            place.write_text("mine")
        elif name in ("heads out", "heads ring"):
            place.symlink_to(tmp_path / "moved" if name == "heads out" else place)
        else:
            (place / "inside").mkdir(parents=True)
        before, kept = content(out), records(out)

        with pytest.raises(OutputError, match="of another kind") as caught:
            run(made, out)

        assert caught.value.exit_code == 2
        assert str(place) in str(caught.value)
        assert "Move them away" in str(caught.value)
        assert (content(out), records(out)) == (before, kept)
        shutil.rmtree(place) if place.is_dir() and not place.is_symlink() else os.unlink(place)
        run(made, out)
        assert merging.verify(out).unchanged

    @pytest.mark.parametrize("name", ["merged", "calibrated"])
    @pytest.mark.parametrize("kind", ["file", "link in a ring"])
    def test_in_place_of_a_checkpoint_they_are_refused_before_the_work(
        self,
        made: Path,  # noqa: F811
        tmp_path: Path,
        name: str,
        kind: str,
    ) -> None:
        out = copy_of(made, "out", tmp_path)
        shutil.move(out / name, tmp_path / "moved")
        if kind == "file":
            (out / name).write_text("mine")
        else:
            (out / name).symlink_to(out / name)
        before, kept = content(out), records(out)

        with pytest.raises(
            OutputError, match=r"expected a folder[\s\S]*(another output path|[Rr]emove)"
        ) as caught:
            run(made, out)

        assert caught.value.exit_code == 2
        assert (content(out), records(out)) == (before, kept)

    @pytest.mark.parametrize("full", [True, False], ids=["with a file", "empty"])
    def test_a_folder_in_place_of_a_checkpoints_file_is_set_aside(
        self,
        made: Path,  # noqa: F811
        tmp_path: Path,
        full: bool,
    ) -> None:
        out = copy_of(made, "out", tmp_path)
        card = out / "merged" / "README.md"
        card.unlink()
        card.mkdir()
        if full:
            (card / "mine.txt").write_text("mine")

        report = run(made, out)

        assert card.is_file()
        assert (out / "merged" / "yours-1" / "README.md").is_dir()
        assert not full or (out / "merged" / "yours-1" / "README.md" / "mine.txt").read_text() == "mine"
        assert any("its name was needed" in one for one in report.warnings)
        assert merging.verify(out).unchanged
