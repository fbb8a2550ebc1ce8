"""Results of another spec are removed so that nothing looks whole meanwhile, and nothing of others goes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from merging.checkpoints.manifest import MANIFEST, listed_files, read_manifest, remove_listed

FILES = {
    "README.md": b"card",
    "config.json": b"{}",
    "model-00001-of-00002.safetensors": b"one",
    "model-00002-of-00002.safetensors": b"two",
    "model.safetensors.index.json": b"{}",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    place = tmp_path / "merged"
    place.mkdir()
    for name, content in FILES.items():
        (place / name).write_bytes(content)
    sizes = {name: len(content) for name, content in FILES.items()}
    (place / MANIFEST).write_text(json.dumps({"fingerprint": "f", "files": sizes}))
    return place


@pytest.mark.parametrize("stop", range(len(FILES)))
def test_cut_short_at_any_file_it_does_not_look_whole_and_can_be_gone_on_with(
    folder: Path, monkeypatch: pytest.MonkeyPatch, stop: int
) -> None:
    true, removed = Path.unlink, 0

    def unlink(path: Path, missing_ok: bool = False) -> None:
        nonlocal removed
        if removed == stop:
            raise KeyboardInterrupt
        removed += 1
        true(path, missing_ok=missing_ok)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", unlink)
        with pytest.raises(KeyboardInterrupt):
            remove_listed(folder)

    assert "fingerprint" not in (read_manifest(folder) or {})
    present = {path.name for path in folder.iterdir()}
    assert "model.safetensors.index.json" not in present or FILES.keys() <= present
    remove_listed(folder)
    assert not folder.exists()


def test_files_behind_a_link_that_leads_out_are_not_ours(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "file").write_bytes(b"mine")
    (folder / "sub").symlink_to(tmp_path / "elsewhere")
    (folder / MANIFEST).write_text(json.dumps({"files": {"sub/file": 4}}))

    remove_listed(folder)

    assert listed_files(folder) is None
    assert (tmp_path / "elsewhere" / "file").read_bytes() == b"mine"
