"""Paths and hub ids become folders: from the cache, from a hub, or with an answer that says what is wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time

import pytest
import torch
from hub_server import COMMIT, HubServer
from safetensors.torch import save, save_file

from merging.checkpoints.folder import open_checkpoint
from merging.checkpoints.hub import resolve
from merging.errors import CheckpointError

TENSORS = {"w": torch.arange(6.0)}
ASK = """
import json, sys
from pathlib import Path
from merging.checkpoints.hub import resolve
from merging.errors import CheckpointError
for model, revision in json.loads(sys.argv[1]):
    try:
        found = resolve(model, revision=revision, folder=Path(sys.argv[2]))
        print(json.dumps([str(found.path), found.repo_id, found.revision]))
    except CheckpointError as error:
        print(json.dumps(str(error)))
"""


def ask(folder, questions, **environment):
    """Resolve in a process of its own, whose environment says where hub and cache are."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "HUGGINGFACE"))}
    done = subprocess.run(
        [sys.executable, "-c", ASK, json.dumps(questions), str(folder)],
        env={**clean, "HF_HOME": str(folder / "hf"), "HF_HUB_DISABLE_TELEMETRY": "1", **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def cached(folder, repo_id, files, *, ref="main"):
    """A model in the hub's cache, as huggingface_hub lays it out: blobs, a ref, a snapshot of links."""
    repository = folder / "hf" / "hub" / f"models--{repo_id.replace('/', '--')}"
    snapshot = repository / "snapshots" / COMMIT
    for part in (repository / "blobs", repository / "refs", snapshot):
        part.mkdir(parents=True)
    (repository / "refs" / ref).write_text(COMMIT)
    for number, (name, content) in enumerate(files.items()):
        (repository / "blobs" / f"{number:040x}").write_bytes(content)
        (snapshot / name).symlink_to(f"../../blobs/{number:040x}")
    return snapshot


def test_a_cached_model_is_found_offline(tmp_path):
    weights = {"config.json": b"{}", "model.safetensors": save(TENSORS)}
    snapshot = cached(tmp_path, "org/name", weights)
    cached(tmp_path, "org/tagged", weights, ref="v2")
    cached(tmp_path, "org/old", {"config.json": b"{}", "pytorch_model.bin": b"..."})
    found, by_commit, by_tag, old, missing, untagged = ask(
        tmp_path,
        [
            ["org/name", None],
            ["org/name", COMMIT],
            ["org/tagged", "v2"],
            ["org/old", None],
            ["org/other", None],
            ["org/name", "v3"],
        ],
        HF_HUB_OFFLINE="1",
    )
    assert found == by_commit == [str(snapshot), "org/name", COMMIT]
    assert by_tag[1:] == ["org/tagged", COMMIT]
    assert old[1] == "org/old"
    assert '"org/other" is not in the cache' in missing
    assert "HF_HUB_OFFLINE" in missing
    assert '"org/name" at revision "v3" is not in the cache' in untagged
    source = open_checkpoint(snapshot)
    assert torch.equal(source.read("w"), TENSORS["w"])


def test_an_unreachable_hub_falls_back_on_the_cache(tmp_path):
    snapshot = cached(tmp_path, "org/name", {"config.json": b"{}", "model.safetensors": save(TENSORS)})
    found, missing = ask(
        tmp_path, [["org/name", None], ["org/other", None]], HF_ENDPOINT="http://127.0.0.1:9"
    )
    assert found == [str(snapshot), "org/name", COMMIT]
    assert '"org/other" is not in the cache' in missing
    assert "the hub cannot be reached" in missing


def test_safetensors_are_fetched_before_pickles_and_code_never(tmp_path):
    both = {
        "config.json": b"{}",
        "tokenizer.json": b"{}",
        "model.safetensors": save(TENSORS),
        "pytorch_model.bin": b"pickle",
        "modeling_mine.py": b"code",
        "onnx/model.onnx": b"onnx",
        "README.md": b"readme",
    }
    old = {"config.json": b"{}", "pytorch_model.bin": b"pickle", "training_args.bin": b"pickle"}
    with HubServer({"org/both": both, "org/old": old}) as hub:
        first, second = ask(tmp_path, [["org/both", None], ["org/old", "main"]], HF_ENDPOINT=hub.url)
        fetched = set(hub.asked)
    assert first[1:] == ["org/both", COMMIT]
    assert second[1:] == ["org/old", COMMIT]
    assert fetched == {"config.json", "tokenizer.json", "model.safetensors", "pytorch_model.bin", "README.md"}
    assert set(os.listdir(first[0])) == {"config.json", "tokenizer.json", "model.safetensors", "README.md"}
    assert set(os.listdir(second[0])) == {"config.json", "pytorch_model.bin"}
    again = ask(tmp_path, [["org/both", None], ["org/old", None]], HF_HUB_OFFLINE="1")
    assert again == [first, second]


def test_each_refusal_of_the_hub_has_its_own_words(tmp_path):
    with HubServer({"org/name": {"config.json": b"{}"}}, gated=frozenset({"org/gated"})) as hub:
        missing, gated, revision, ill = ask(
            tmp_path,
            [["org/nothing", None], ["org/gated", None], ["org/name", "v9"], ["org/--x", None]],
            HF_ENDPOINT=hub.url,
        )
    assert f'"org/nothing" is neither a path ({tmp_path / "org/nothing"} does not exist)' in missing
    assert '"org/gated" is gated' in gated
    assert "hf auth login" in gated
    assert '"org/name" has no revision "v9"' in revision
    assert "nor a model on the hub" in ill


@pytest.fixture
def models(tmp_path):
    (tmp_path / "experts/cars").mkdir(parents=True)
    save_file(TENSORS, tmp_path / "experts/cars/model.safetensors")
    return tmp_path


@pytest.mark.parametrize("name", ["experts/cars", "./experts/cars", "experts/cars/model.safetensors"])
def test_local_paths_start_at_the_folder_given(models, name):
    found = resolve(name, folder=models)
    assert found.path == models / name
    assert (found.repo_id, found.revision) == (None, None)
    assert resolve(str(models / name), folder=models / "elsewhere").path == models / name


@pytest.mark.parametrize(
    "name", ["./experts/cras", "experts/cras", "experts/cars/x/y", "/no/such/path", "../x"]
)
def test_a_misspelt_path_is_answered_at_once_without_the_hub(models, name):
    started = time.monotonic()
    with pytest.raises(CheckpointError, match="does not exist") as caught:
        resolve(name, folder=models)
    assert time.monotonic() - started < 1
    if "cras" in name:
        assert 'experts/cars"?' in str(caught.value)


def test_a_bare_name_like_a_neighbour_is_a_misspelt_path(models):
    with pytest.raises(CheckpointError, match=r'(?s)expert does not exist.*experts"\?'):
        resolve("expert", folder=models)


@pytest.mark.parametrize("name", ["run+1", "exp@v2", "my model", "\u65e5\u672c", "n" * 200])
def test_any_folder_name_works(tmp_path, name):
    (tmp_path / name).mkdir()
    assert resolve(name, folder=tmp_path).path == tmp_path / name


def test_a_path_has_no_revision(models):
    with pytest.raises(CheckpointError, match='has no revision "v2"'):
        resolve("experts/cars", revision="v2", folder=models)
