"""The output folder of a run: ours or refused, one run at a time, user files untouched."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from merging.checkpoints.disk_sink import SafetensorsSink
from merging.checkpoints.run_folder import RunFolder
from merging.checkpoints.source import StateDictSource
from merging.errors import OutputError

SPEC = {"base": "b", "merge": {"type": "ties", "scale": 0.3}}
OTHER = {"base": "b", "merge": {"type": "ties", "scale": 0.4, "density": 0.2}}


def opened(path, fingerprint="f", spec=SPEC, **more):
    folder = RunFolder(path)
    folder.open(fingerprint, spec, **more)
    return folder


def finish_stage(folder, name, fingerprint):
    source = StateDictSource({"w": torch.ones(3)})
    files = {"manifest.json": json.dumps({"fingerprint": fingerprint})}
    with SafetensorsSink(folder.claim(name), source, files=files) as sink:
        sink.write("w", torch.ones(3))


def visible(path):
    found = {file.relative_to(path).as_posix() for file in path.rglob("*") if file.is_file()}
    return {name for name in found if not name.startswith(".merging/")}


def test_a_new_folder_is_made_and_an_empty_one_taken(tmp_path):
    with opened(tmp_path / "new"):
        pass
    (tmp_path / "empty").mkdir()
    with opened(tmp_path / "empty") as folder:
        assert folder.work.is_dir()
    assert not folder.work.exists()


def test_the_same_run_goes_on_and_finds_what_is_done(tmp_path):
    with opened(tmp_path / "out") as folder:
        assert not folder.stage_done("merged", "m")
        finish_stage(folder, "merged", "m")
        assert folder.stage_done("merged", "m")
    with opened(tmp_path / "out") as folder:
        assert folder.stage_done("merged", "m")
        assert not folder.stage_done("merged", "other")
        assert not folder.stage_done("calibrated", "m")


def test_a_stage_whose_files_are_gone_or_cut_is_not_done(tmp_path):
    with opened(tmp_path / "out") as folder:
        finish_stage(folder, "merged", "m")
        weights = tmp_path / "out/merged/model.safetensors"
        content = weights.read_bytes()
        weights.write_bytes(content[:-1])
        assert not folder.stage_done("merged", "m")
        weights.unlink()
        assert not folder.stage_done("merged", "m")
        finish_stage(folder, "merged", "m")
        assert folder.stage_done("merged", "m")


def test_another_spec_is_refused_with_the_keys_that_differ(tmp_path):
    with opened(tmp_path / "out"):
        pass
    with pytest.raises(OutputError, match="was made from another spec") as caught:
        opened(tmp_path / "out", "g", OTHER)
    assert "merge.scale: 0.3 there, 0.4 now" in str(caught.value)
    assert "merge.density: not set there, 0.2 now" in str(caught.value)
    assert "--overwrite" in str(caught.value)


def test_the_same_spec_on_changed_inputs_says_so(tmp_path):
    with opened(tmp_path / "out"):
        pass
    with pytest.raises(OutputError, match="the models or data that it names have changed"):
        opened(tmp_path / "out", "g")


def test_overwriting_removes_what_is_ours_and_nothing_else(tmp_path):
    out = tmp_path / "out"
    with opened(out) as folder:
        finish_stage(folder, "merged", "m")
        finish_stage(folder, "calibrated", "c")
        folder.write_atomic("report.json", "{}")
        folder.write_atomic("heads/mnist.safetensors", "head")
    users = {"notes.txt", "merged/mine.txt", "heads/mine.safetensors", "plots/a.png"}
    for name in users:
        (out / name).parent.mkdir(exist_ok=True)
        (out / name).write_text("mine")

    with opened(out, "g", OTHER, overwrite=True) as folder:
        assert visible(out) == {*users, "merged/manifest.json"}
        assert not (out / "calibrated").exists()
        finish_stage(folder, "merged", "n")

    assert visible(out) == {*users, "merged/manifest.json", "merged/model.safetensors"}
    assert all((out / name).read_text() == "mine" for name in users)
    with opened(out, "h", SPEC, overwrite=True):
        assert visible(out) == {*users, "merged/manifest.json"}


def test_a_folder_of_someone_else_is_refused_and_with_overwrite_shared(tmp_path):
    (tmp_path / "thesis.tex").write_text("mine")
    with pytest.raises(OutputError, match=r"is not empty and was not made by a run: thesis\.tex"):
        opened(tmp_path)
    assert visible(tmp_path) == {"thesis.tex"}
    assert not (tmp_path / ".merging").exists()
    with opened(tmp_path, overwrite=True) as folder:
        finish_stage(folder, "merged", "m")
    with opened(tmp_path, "g", OTHER, overwrite=True):
        assert visible(tmp_path) == {"thesis.tex"}


def test_names_that_a_run_needs_are_not_taken_from_the_user(tmp_path):
    (tmp_path / "report.json").write_text("mine")
    with pytest.raises(OutputError, match=r"holds report\.json, which a run needs"):
        opened(tmp_path, overwrite=True)
    assert (tmp_path / "report.json").read_text() == "mine"
    assert not (tmp_path / ".merging").exists()


def test_places_that_cannot_be_used(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="is a file, expected a folder"):
        opened(tmp_path / "file")
    with pytest.raises(OutputError, match=r"cannot be made: .* is a file"):
        opened(tmp_path / "file" / "b")
    with opened(tmp_path / "a" / "b"):
        assert (tmp_path / "a" / "b").is_dir()
    with pytest.raises(OutputError, match=r"is read-only|nothing can be written"):
        opened(Path("/proc/out"))


def test_only_names_inside_the_folder_can_be_claimed(tmp_path):
    with opened(tmp_path / "out") as folder:
        for name in ("../x", "/x", "", ".merging/state.json", "a/../../b"):
            with pytest.raises(OutputError, match="is not the name of something in the output folder"):
                folder.claim(name)


def test_small_files_are_replaced_whole_and_leave_no_scraps(tmp_path):
    with opened(tmp_path / "out") as folder:
        for text in ("one", "two"):
            folder.write_atomic("report.json", text)
            assert (tmp_path / "out/report.json").read_text() == text
    assert visible(tmp_path / "out") == {"report.json"}


HOLDING = """
import sys, time
from pathlib import Path
from merging.checkpoints.run_folder import RunFolder
folder = RunFolder(Path(sys.argv[1]))
folder.open("f", {"base": "b"})
print("working", flush=True)
time.sleep(60)
"""


def test_a_second_run_is_refused_until_the_first_is_gone(tmp_path):
    holder = subprocess.Popen([sys.executable, "-c", HOLDING, str(tmp_path / "out")], stdout=subprocess.PIPE)
    with holder:
        assert holder.stdout.readline() == b"working\n"
        with pytest.raises(OutputError, match=rf"another run \(pid {holder.pid}\) is working in"):
            opened(tmp_path / "out", "f", {"base": "b"})
        holder.send_signal(signal.SIGKILL)
        holder.wait()
    with opened(tmp_path / "out", "f", {"base": "b"}):
        pass


def test_two_runs_in_one_process_exclude_each_other_too(tmp_path):
    with opened(tmp_path / "out"), pytest.raises(OutputError, match="another run"):
        opened(tmp_path / "out")
    with opened(tmp_path / "out"):
        pass


DYING = """
import os, sys, torch
from pathlib import Path
from merging.checkpoints.disk_sink import SafetensorsSink
from merging.checkpoints.run_folder import RunFolder
from merging.checkpoints.source import StateDictSource
folder = RunFolder(Path(sys.argv[1]))
folder.open("f", {"base": "b"})
(folder.work / "large").write_text("x")
source = StateDictSource({"w": torch.ones(2), "v": torch.ones(2)})
sink = SafetensorsSink(folder.claim("merged"), source)
sink.write("w", torch.ones(2))
(folder.state / ".report.json.01234567.tmp").write_text("scrap")
os.kill(os.getpid(), 9)
"""


def test_what_a_killed_run_left_looks_like_nothing_and_is_cleaned_by_the_next(tmp_path):
    out = tmp_path / "out"
    done = subprocess.run([sys.executable, "-c", DYING, str(out)], check=False)
    assert done.returncode == -signal.SIGKILL
    assert sorted(path.name for path in out.iterdir() if not path.name.startswith(".")) == []
    assert [path.name for path in out.iterdir() if ".partial-" in path.name]

    folder = RunFolder(out)
    notes = folder.open("f", {"base": "b"})

    assert "left by a run that did not end" in notes[0]
    assert [path.name for path in out.iterdir()] == [".merging"]
    assert list(folder.work.iterdir()) == []
    assert list(folder.state.glob("*.tmp")) == []
    assert not folder.stage_done("merged", "m")
    folder.close()


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"owned": 3}', "[" * 50_000])
def test_a_damaged_state_makes_the_folder_foreign(tmp_path, text):
    out = tmp_path / "out"
    with opened(out) as folder:
        finish_stage(folder, "merged", "m")
    (out / ".merging/state.json").write_text(text)
    with pytest.raises(OutputError, match="holds merged, and the record of what runs made there"):
        opened(out)
    with pytest.raises(OutputError, match="holds merged"):
        opened(out, overwrite=True)


def test_a_state_that_names_files_elsewhere_is_not_followed(tmp_path):
    out = tmp_path / "out"
    with opened(out):
        pass
    (tmp_path / "precious").write_text("mine")
    state = json.loads((out / ".merging/state.json").read_text())
    (out / ".merging/state.json").write_text(json.dumps({**state, "owned": ["../precious"]}))
    with pytest.raises(OutputError, match="is not the name of something"):
        opened(out, "g", OTHER, overwrite=True)
    assert (tmp_path / "precious").read_text() == "mine"


@pytest.mark.parametrize("kind", ["link", "pipe", "folder"])
def test_a_lock_that_is_no_file_of_ours_is_left_alone(tmp_path, kind):
    (tmp_path / "out" / ".merging").mkdir(parents=True)
    lock, precious = tmp_path / "out" / ".merging" / "lock", tmp_path / "precious"
    precious.write_text("precious")
    {"link": lambda: lock.symlink_to(precious), "pipe": lambda: os.mkfifo(lock), "folder": lock.mkdir}[kind]()

    with pytest.raises(OutputError, match="lock"):
        RunFolder(tmp_path / "out").open("a", {})

    assert precious.read_text() == "precious"


def test_nothing_is_written_through_a_link_that_leads_out(tmp_path):
    folder = RunFolder(tmp_path / "out")
    folder.open("a", {})
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (tmp_path / "out" / "heads").symlink_to(elsewhere)

    with folder, pytest.raises(OutputError, match="leads out"):
        folder.write_atomic("heads/a.json", "{}")

    assert not list(elsewhere.iterdir())


def test_links_that_lead_nowhere_are_told_with_where_they_lead(tmp_path):
    (tmp_path / "link").symlink_to("nowhere")

    for place in (tmp_path / "link", tmp_path / "link" / "out"):
        with pytest.raises(OutputError, match=r'link is a link to "nowhere", which is not there'):
            RunFolder(place).check()
