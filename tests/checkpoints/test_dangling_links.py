"""Links to files that are gone, as a repository of git-annex or a pruned cache leaves them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from merging_cli.main import main
from safetensors.torch import save_file

from merging.checkpoints.folder import open_checkpoint
from merging.checkpoints.lora import open_adapter
from merging.checkpoints.source import StateDictSource
from merging.errors import CheckpointError

GONE = "leads nowhere"


@pytest.fixture
def spec(tmp_path: Path) -> Path:
    weight = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))
    for name in ("base", "digits"):
        (tmp_path / name).mkdir()
        save_file({"weight": weight}, tmp_path / name / "model.safetensors")
    asked = {"base": "base", "experts": {"digits": "digits"}, "merge": {"type": "average"}, "output": "out"}
    (tmp_path / "spec.json").write_text(json.dumps({**asked, "device": "cpu"}))
    return tmp_path / "spec.json"


def dangling(file: Path, target: str = "gone") -> None:
    file.unlink(missing_ok=True)
    file.symlink_to(target)


@pytest.mark.parametrize("command", ["run", "validate"])
@pytest.mark.parametrize("role", ["base", "digits"])
def test_weights_that_are_a_dead_link_are_told_before_the_work(
    spec: Path, role: str, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = spec.parent / role / "model.safetensors"
    dangling(file)

    code = main(["pipeline", command, str(spec)])

    told = capsys.readouterr().err
    assert code == 2
    assert f"{file} is a link that {GONE}" in told
    assert "Fetch it again" in told
    assert not (spec.parent / "out").exists()


@pytest.mark.parametrize(
    "name", ["pytorch_model.bin", "model.safetensors.index.json", "pytorch_model.bin.index.json"]
)
def test_pickles_and_indexes_too(tmp_path: Path, name: str) -> None:
    dangling(tmp_path / name)

    with pytest.raises(CheckpointError, match=GONE):
        open_checkpoint(tmp_path)


def test_one_shard_of_several(tmp_path: Path) -> None:
    shards = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    for name, shard in zip("ab", shards, strict=True):
        save_file({name: torch.ones(1)}, tmp_path / shard)
    index = {"weight_map": dict(zip("ab", shards, strict=True))}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    dangling(tmp_path / shards[1])

    with pytest.raises(CheckpointError, match=rf"{shards[1]} is a link that {GONE}"):
        open_checkpoint(tmp_path)


def test_a_file_of_git_annex_is_fetched_by_its_command(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    dangling(tmp_path / "model" / "model.safetensors", "../.git/annex/objects/zX/SHA256E-s9--0.safetensors")

    with pytest.raises(CheckpointError, match=rf'{GONE}[\s\S]*"git annex get model\.safetensors"'):
        open_checkpoint(tmp_path / "model")


@pytest.mark.parametrize("name", ["adapter_model.safetensors", "adapter_model.bin", "adapter_config.json"])
def test_files_of_an_adapter(tmp_path: Path, name: str) -> None:
    (tmp_path / "adapter_config.json").write_text('{"r": 1}')
    dangling(tmp_path / name)

    with pytest.raises(CheckpointError, match=rf"{name} is a link that {GONE}"):
        open_adapter(tmp_path, StateDictSource({"X.weight": torch.ones(4, 4)}), None)


def test_a_folder_that_is_a_dead_link_is_not_offered_as_its_own_correction(tmp_path: Path) -> None:
    dangling(tmp_path / "model")

    with pytest.raises(CheckpointError, match=GONE) as caught:
        open_checkpoint(tmp_path / "model")

    assert "Did you mean" not in str(caught.value)
