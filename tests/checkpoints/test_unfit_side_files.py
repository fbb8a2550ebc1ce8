"""Files beside the weights that cannot go into a result, paths that no file system takes, links in a ring:
told before the work, and before a folder is made."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from merging_cli.main import main
from safetensors.torch import save_file

from merging.checkpoints.folder import open_checkpoint
from merging.checkpoints.run_folder import RunFolder
from merging.checkpoints.side_files import refuse_unfit_side_files
from merging.errors import CheckpointError, OutputError
from merging.verifying import verify


@pytest.fixture
def spec(tmp_path: Path) -> Path:
    for name in ("base", "a", "b"):
        (tmp_path / name).mkdir()
        save_file({"weight": torch.ones(2, 2)}, tmp_path / name / "model.safetensors")
    asked = {"base": "base", "experts": {"a": "a", "b": "b"}, "merge": {"type": "average"}, "output": "out"}
    (tmp_path / "spec.json").write_text(json.dumps({**asked, "device": "cpu"}))
    return tmp_path / "spec.json"


@pytest.mark.parametrize("command", ["run", "validate"])
@pytest.mark.parametrize("name", ["tokenizer.json", "LICENSE", "generation_config.json"])
@pytest.mark.parametrize("kind", ["pipe", "link out", "dead link", "ring"])
def test_a_side_file_that_cannot_be_copied(
    spec: Path, name: str, kind: str, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = spec.parent / "base" / name
    if kind == "pipe":
        os.mkfifo(file)
    else:
        file.symlink_to({"link out": "/etc/passwd", "dead link": "gone", "ring": name}[kind])

    code = main(["pipeline", command, str(spec)])

    told = capsys.readouterr().err
    assert code == 2
    assert str(spec.parent / "base") in told
    assert name in told
    assert not (spec.parent / "out").exists()


def test_links_within_the_folder_are_good(spec: Path) -> None:
    folder = spec.parent / "base"
    (folder / "terms").write_text("yours")
    (folder / "LICENSE").symlink_to("terms")

    refuse_unfit_side_files(folder)


@pytest.mark.parametrize("command", ["run", "validate"])
def test_an_output_path_that_no_file_system_takes(
    spec: Path, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = json.loads(spec.read_text())
    spec.write_text(json.dumps({**asked, "output": "y" * 300}))

    assert main(["pipeline", command, str(spec)]) == 2
    told = capsys.readouterr().err
    assert "cannot be an output folder: a name in it is 300 bytes long, expected at most 255" in told
    assert "Choose another" in told


@pytest.mark.parametrize("command", ["run", "validate", "plan"])
def test_an_output_path_of_more_folders_than_can_be_made(
    spec: Path, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = json.loads(spec.read_text())
    spec.write_text(json.dumps({**asked, "output": "d/" * 1500}))

    assert main(["pipeline", command, str(spec)]) == 2
    told = capsys.readouterr().err
    assert "folders deep, expected at most 3500 and 200" in told
    assert "Traceback" not in told
    assert len(told) < 800
    assert not (spec.parent / "d").exists()


@pytest.mark.parametrize("name", ["y" * 300, "/".join(["long"] * 2000), "d/" * 500, "ring/out"])
def test_an_output_folder_that_cannot_be(tmp_path: Path, name: str) -> None:
    (tmp_path / "ring").symlink_to("ring")

    with pytest.raises(OutputError, match="cannot be an output folder"):
        RunFolder(tmp_path / name).check()
    RunFolder(tmp_path / "new" / "out").check()


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_weights_that_are_a_link_to_themselves(tmp_path: Path, name: str) -> None:
    (tmp_path / name).symlink_to(name)

    with pytest.raises(CheckpointError, match=f"{name} is a link that leads to no file"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("where", ["input", "output"])
def test_a_manifest_with_names_beyond_all_length_is_not_told_as_a_change(
    tmp_path: Path, where: str, capsys: pytest.CaptureFixture[str]
) -> None:
    digest = "0" * 64
    written = "y" * 300 if where == "output" else "model.safetensors"
    path = "/" + "x/" * 2500 if where == "input" else "/models/base"
    inputs = {"base": {"model": "base", "path": path, "files": {"config.json": {"sha256": digest}}}}
    manifest = {"files": {written: 1}, "sha256": {written: digest}, "inputs": inputs}
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))

    with pytest.raises(CheckpointError, match="names a file that cannot be looked at") as caught:
        verify(tmp_path)

    assert "File name too long" in str(caught.value)
    assert len(str(caught.value)) < 800
    assert main(["verify", str(tmp_path)]) == 2
    assert "Traceback" not in capsys.readouterr().err
