"""What a run leaves on disk: what people report, and what they see here."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import transformers as hf
from safetensors import safe_open
from small_models import expert, llama, run, saved, spec_of

from merging.errors import MergingError, OutputError
from merging.pipeline import Pipeline

Usage = namedtuple("Usage", "total used free")

STOPS: dict[str, type[BaseException]] = {
    "a fault": ZeroDivisionError,
    "ctrl-c": KeyboardInterrupt,
    "exit": SystemExit,
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, base = tmp_path_factory.mktemp("models"), llama()
    saved(base, folder / "base")
    for seed, name in enumerate(("one", "two"), start=1):
        saved(expert(base, seed), folder / name)
    return folder


def spec(models: Path, **changes: Any) -> dict[str, Any]:
    return spec_of(models / "base", {name: models / name for name in ("one", "two")}, **changes)


@pytest.mark.parametrize("kind", STOPS)
def test_a_run_that_stops_half_way_leaves_nothing_that_looks_like_a_model(
    models: Path, tmp_path: Path, kind: str
) -> None:
    """Whether something fails, the user presses Ctrl-C or the program is told to end."""

    def stop(stage: str, done: int, total: int) -> None:
        if stage == "merge" and done > total / 2:
            raise STOPS[kind]

    with pytest.raises(STOPS[kind]):
        Pipeline.from_spec(spec(models)).run(tmp_path / "out", progress=stop)

    assert [path.name for path in (tmp_path / "out").iterdir()] == [".merging"]
    assert not list(tmp_path.rglob("model*.safetensors"))
    assert not list(tmp_path.rglob("config.json"))


def test_a_disk_that_is_too_small_is_found_before_the_merge(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    merged = []
    monkeypatch.setattr(shutil, "disk_usage", lambda place: Usage(10**9, 10**9 - 50_000, 50_000))

    with pytest.raises(MergingError, match=r"out: .*, its disk has 50\.0 [kK]B free") as caught:
        Pipeline.from_spec(spec(models)).run(tmp_path / "out", progress=lambda *event: merged.append(event))

    assert caught.value.exit_code == 2
    assert not [event for event in merged if event[0] == "merge"]
    assert not (tmp_path / "out" / "merged").exists()


LIMITED = """
import resource, sys
limit = int(sys.argv[3])
resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
from merging_cli.main import main
sys.exit(main(["pipeline", "run", sys.argv[1], "--out", sys.argv[2], "-q"]))
"""


def test_room_that_vanishes_on_the_way_is_one_line_and_leaves_no_files(models: Path, tmp_path: Path) -> None:
    (tmp_path / "spec.json").write_text(json.dumps(spec(models)))
    out = tmp_path / "out"

    command = [sys.executable, "-c", LIMITED, str(tmp_path / "spec.json"), str(out), "60000"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)

    assert done.returncode == 1, done.stderr
    assert "no room to write" in done.stderr
    assert "Traceback" not in done.stderr
    assert not list(out.rglob("*.safetensors"))
    assert not (out / "merged").exists()


@pytest.mark.parametrize(("size", "shards"), [(None, 1), ("1GB", 1), ("40kB", 3)])
def test_an_index_is_there_exactly_where_there_are_shards_and_all_of_it_loads_offline(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: str | None, shards: int
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    output = {} if size is None else {"output": {"shard_size": size}}

    folder = run(tmp_path / "out", spec(models, **output))

    files = sorted(folder.glob("*.safetensors"))
    index = folder / "model.safetensors.index.json"
    assert (len(files) > 1) == (shards > 1) == index.exists()
    stored = {}
    for file in files:
        with safe_open(file, "pt") as opened:
            assert opened.metadata() == {"format": "pt"}
            stored |= dict.fromkeys(opened.keys(), file.name)
    if index.exists():
        assert json.loads(index.read_text())["weight_map"] == stored
    _, loading = hf.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(loading[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))


def test_an_earlier_runs_shards_and_index_go_and_the_users_notes_stay(models: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    run(out, spec(models, output={"shard_size": "40kB"}))
    (out / "merged" / "notes.txt").write_text("mine")
    again = Pipeline.from_spec(spec(models, output={"shard_size": "1GB"}))

    with pytest.raises(OutputError, match="made from another spec"):
        again.run(out)
    again.run(out, overwrite=True)

    names = {path.name for path in (out / "merged").iterdir()}
    assert (out / "merged" / "notes.txt").read_text() == "mine"
    assert [name for name in names if name.endswith((".safetensors", ".index.json"))] == ["model.safetensors"]


def test_a_folder_of_the_users_own_is_not_taken(models: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").write_text("mine")

    with pytest.raises(MergingError) as caught:
        run(tmp_path / "out", spec(models))

    assert "overwrite" in str(caught.value)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["thesis.txt"]
