"""Taking an old folder's place: user files stay, nothing stale survives, and a run may die at any moment."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from merging.checkpoints.disk_sink import SafetensorsSink
from merging.checkpoints.folder import open_checkpoint
from merging.checkpoints.manifest import remove_listed
from merging.checkpoints.publish import Partial, recover
from merging.checkpoints.source import StateDictSource
from merging.errors import OutputError

OLD = {"a": torch.zeros(8, 4), "b": torch.zeros(8, 4), "c": torch.zeros(3)}
NEW = {name: tensor + 1 for name, tensor in OLD.items()}


def write(target, tensors, **more):
    source = StateDictSource(tensors)
    sink = SafetensorsSink(target, source, **more)
    with sink:
        for name in source.names():
            sink.write(name, source.read(name))
    return sink


def names_in(folder):
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def value(target):
    source = open_checkpoint(target)
    return {float(source.read(name).max()) for name in source.names()}


def test_two_shards_then_one_and_the_users_files_survive(tmp_path):
    write(tmp_path / "out", OLD, shard_size=150, files={"README.md": "old", "extra/old.txt": "old"})
    assert len(list((tmp_path / "out").glob("*.safetensors"))) == 2
    (tmp_path / "out/notes.txt").write_text("mine")
    (tmp_path / "out/plots/deep").mkdir(parents=True)
    (tmp_path / "out/plots/deep/a.png").write_text("mine")
    (tmp_path / "out/empty").mkdir()
    (tmp_path / "out/extra/mine.txt").write_text("mine")
    (tmp_path / "out/link").symlink_to("nowhere")

    write(tmp_path / "out", NEW, files={"README.md": "new"})

    kept = {"notes.txt", "plots/deep/a.png", "extra/mine.txt"}
    assert names_in(tmp_path / "out") == {"model.safetensors", "manifest.json", "README.md", *kept}
    assert all((tmp_path / "out" / name).read_text() == "mine" for name in kept)
    assert (tmp_path / "out/README.md").read_text() == "new"
    assert (tmp_path / "out/empty").is_dir()
    assert os.readlink(tmp_path / "out/link") == "nowhere"
    assert value(tmp_path / "out") == {1.0}
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_users_file_whose_name_is_needed_is_kept_under_another(tmp_path):
    write(tmp_path / "out", OLD)
    for content in ("first", "second"):
        (tmp_path / "out/README.md").write_text(content)
        manifest = json.loads((tmp_path / "out/manifest.json").read_text())
        manifest["files"].pop("README.md", None)
        (tmp_path / "out/manifest.json").write_text(json.dumps(manifest))
        sink = write(tmp_path / "out", NEW, files={"README.md": "ours"})
    assert (tmp_path / "out/README.md").read_text() == "ours"
    assert (tmp_path / "out/yours-1/README.md").read_text() == "first"
    assert (tmp_path / "out/yours-2/README.md").read_text() == "second"
    assert sink.notes == ["README.md: its name was needed, your file is now yours-2/README.md"]


def test_a_folder_of_someone_else_is_refused(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out/thesis.tex").write_text("mine")
    with pytest.raises(OutputError, match=r"not written by this program: thesis\.tex"):
        write(tmp_path / "out", NEW)
    (tmp_path / "out/manifest.json").write_text('{"files": {"../../x": 1}}')
    with pytest.raises(OutputError, match="not written by this program"):
        write(tmp_path / "out", NEW)
    assert names_in(tmp_path) == {"out/thesis.tex", "out/manifest.json"}


def test_an_empty_folder_and_a_link_to_a_folder_may_be_filled(tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "out").symlink_to("disk")
    write(tmp_path / "out", NEW)
    assert (tmp_path / "out").is_symlink()
    assert value(tmp_path / "disk") == {1.0}


def test_the_folder_has_ordinary_permissions(tmp_path):
    write(tmp_path / "out", NEW)
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain.txt").touch()
    assert (tmp_path / "out").stat().st_mode == (tmp_path / "plain").stat().st_mode
    assert (tmp_path / "out/model.safetensors").stat().st_mode == (tmp_path / "plain.txt").stat().st_mode


def test_what_is_listed_is_removed_and_the_rest_stays_ours_to_fill(tmp_path):
    write(tmp_path / "out", OLD, files={"sub/x.txt": "x"})
    (tmp_path / "out/notes.txt").write_text("mine")
    remove_listed(tmp_path / "out", tmp_path)
    assert names_in(tmp_path / "out") == {"notes.txt", "manifest.json"}
    write(tmp_path / "out", NEW)
    assert (tmp_path / "out/notes.txt").read_text() == "mine"
    (tmp_path / "out/notes.txt").unlink()
    remove_listed(tmp_path / "out", tmp_path)
    assert not (tmp_path / "out").exists()


DYING = """
import os, sys, torch
from pathlib import Path
from merging.checkpoints import publish
from merging.checkpoints.disk_sink import SafetensorsSink
from merging.checkpoints.source import StateDictSource

target, deadly = Path(sys.argv[1]), int(sys.argv[2])
calls = 0

def deadly_call(module, name):
    real = getattr(module, name)
    def call(*args, **kwargs):
        global calls
        if calls == deadly:
            os.kill(os.getpid(), 9)
        calls += 1
        return real(*args, **kwargs)
    setattr(module, name, call)

for name in ("rename", "fsync", "mkdir", "unlink", "rmdir", "pwrite", "ftruncate", "replace"):
    deadly_call(os, name)
source = StateDictSource({"a": torch.ones(8, 4), "b": torch.ones(8, 4), "c": torch.ones(3)})
with SafetensorsSink(target, source, shard_size=150, files={"README.md": "new"}) as sink:
    for name in source.names():
        sink.write(name, source.read(name))
print("finished after", calls)
"""


FORKED = """
import os, shutil, sys
import torch
import merging.checkpoints.disk_sink, merging.checkpoints.source
code, places = sys.stdin.read(), sys.argv[1]
for deadly in range(200):
    place = shutil.copytree(os.path.join(places, "before"), os.path.join(places, str(deadly)))
    pid = os.fork()
    if pid == 0:
        sys.argv = ["-c", os.path.join(place, "out"), str(deadly)]
        exec(compile(code, "dying", "exec"), {"__name__": "__main__"})
        sys.stdout.flush()
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    print("status", place, status, flush=True)
    if status != 9:
        break
"""


def killed_everywhere(places):
    """Kill a writer at each of its system calls, each time in a new copy of `before`; the last one lives."""
    done = subprocess.run(
        [sys.executable, "-c", FORKED, str(places)], input=DYING, capture_output=True, text=True, check=True
    )
    ends = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("status")]
    assert len(ends) > 20, done.stderr
    assert [status for _, status in ends] == ["9"] * (len(ends) - 1) + ["0"], done.stderr
    return [Path(place) / "out" for place, _ in ends]


def test_killed_at_any_moment_there_is_the_whole_or_nothing(tmp_path):
    (tmp_path / "before").mkdir()
    for target in killed_everywhere(tmp_path):
        assert not target.exists() or value(target) == {1.0}
        recover(target)
        assert [path.name for path in target.parent.iterdir()] in ([], ["out"])
    write(target, OLD)
    assert value(target) == {0.0}


def test_killed_while_replacing_the_old_or_the_new_is_whole_and_user_files_are_there(tmp_path):
    (tmp_path / "before").mkdir()
    write(tmp_path / "before/out", OLD, files={"README.md": "old", "sub/old.txt": "old"})
    (tmp_path / "before/out/notes.txt").write_text("mine")
    (tmp_path / "before/out/sub/mine.txt").write_text("mine")
    ends = set()
    for target in killed_everywhere(tmp_path):
        recover(target)
        assert [path.name for path in target.parent.iterdir()] == ["out"]
        ends |= {frozenset(value(target))}
        assert (target / "notes.txt").read_text() == "mine"
        assert (target / "sub/mine.txt").read_text() == "mine"
        manifest = json.loads((target / "manifest.json").read_text())
        assert names_in(target) == {*manifest["files"], "manifest.json", "notes.txt", "sub/mine.txt"}
    assert ends == {frozenset({0.0}), frozenset({1.0})}


def test_a_living_writer_is_left_alone(tmp_path):
    partial = Partial(tmp_path / "out")
    (partial.content / "x").write_text("x")
    assert recover(tmp_path / "out") == []
    assert (partial.content / "x").exists()
    partial.leave()
    assert "left by a run that did not end" in recover(tmp_path / "out")[0]
    assert list(tmp_path.iterdir()) == []


def test_hidden_folders_of_the_user_are_left_alone(tmp_path):
    for name in (".out.partial-mine", ".out.partial-01234567", ".other.partial-01234567"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("mine")
    recover(tmp_path / "out")
    assert len(names_in(tmp_path)) == 3


def test_a_folder_that_appears_in_between_is_not_touched(tmp_path):
    write(tmp_path / "out", OLD)
    partial = Partial(tmp_path / "out")
    (partial.content / "x").write_text("x")
    os.rename(tmp_path / "out", partial.folder / "old")
    partial.leave()
    (tmp_path / "out").mkdir()
    with pytest.raises(OutputError, match="appeared while"):
        recover(tmp_path / "out")


def test_killed_in_the_middle_of_a_long_write(tmp_path):
    script = """
import sys, time, torch
from pathlib import Path
from merging.checkpoints.disk_sink import SafetensorsSink
from merging.checkpoints.source import StateDictSource
source = StateDictSource({"w": torch.zeros(2, 4), "v": torch.zeros(2)})
with SafetensorsSink(Path(sys.argv[1]), source) as sink:
    sink.write("w", torch.ones(1, 4), slice(0, 1))
    print("half", flush=True)
    time.sleep(60)
"""
    ways = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
    writers = {
        number: subprocess.Popen(
            [sys.executable, "-c", script, str(tmp_path / "out")],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        for number in ways
    }
    for number, writer in writers.items():
        with writer:
            assert writer.stdout.readline() == b"half\n"
            writer.send_signal(number)
            writer.wait()
    assert not (tmp_path / "out").exists()
    recover(tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
    write(tmp_path / "out", NEW)
    assert load_file(tmp_path / "out/model.safetensors").keys() == NEW.keys()
