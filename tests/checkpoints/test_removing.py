"""Results of another spec are removed so that nothing looks whole meanwhile, and nothing of others goes."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from merging.checkpoints.amending import amend_
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
            remove_listed(folder, folder.parent)

    assert "fingerprint" not in (read_manifest(folder) or {})
    present = {path.name for path in folder.iterdir()}
    assert "model.safetensors.index.json" not in present or FILES.keys() <= present
    remove_listed(folder, folder.parent)
    assert not folder.exists()


def test_files_behind_a_link_that_leads_out_are_not_ours(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "file").write_bytes(b"mine")
    (folder / "sub").symlink_to(tmp_path / "elsewhere")
    (folder / MANIFEST).write_text(json.dumps({"files": {"sub/file": 4}}))

    remove_listed(folder, folder.parent)

    assert listed_files(folder) is None
    assert (tmp_path / "elsewhere" / "file").read_bytes() == b"mine"


@pytest.mark.parametrize(
    "change", [remove_listed, lambda folder, scratch: amend_(folder, "README.md", "told", scratch=scratch)]
)
def test_killed_before_a_rename_the_unfinished_file_is_not_among_the_results(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[Path, Path], None]
) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    before = sorted(path.name for path in folder.iterdir())
    seen: list[list[str]] = []

    def dies(source: Path, target: Path) -> None:
        seen.append([path.name for path in scratch.iterdir()])
        assert sorted(path.name for path in folder.iterdir()) == before
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", dies)
    with pytest.raises(KeyboardInterrupt):
        change(folder, scratch)

    assert [len(files) for files in seen] == [1]
    assert not list(scratch.iterdir())  # an interrupt, unlike a kill, leaves nothing at all
    assert sorted(path.name for path in folder.iterdir()) == before
