"""The manifest of a folder that this program wrote: its list of files tells what is ours from what is not."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from merging.checkpoints.atomic import write_atomic
from merging.checkpoints.hashing import hashes

MANIFEST = "manifest.json"
FORMAT = 1
"""Of manifests that this version writes, and of those that it understands."""


def listing(folder: Path, files: Sequence[Path]) -> dict[str, dict[str, Any]]:
    """What a manifest says of the files of ours in that folder: `files`, name -> bytes, and `sha256`."""
    digests = hashes(files)
    names = {path.relative_to(folder).as_posix(): path for path in files}
    return {
        "files": {name: path.stat().st_size for name, path in names.items()},
        "sha256": {name: digests[str(path)] for name, path in names.items()},
    }


def listed_files(folder: Path) -> dict[str, int] | None:
    """File -> bytes, of all files of ours in that folder by its manifest; None if it has none of ours."""
    manifest = read_manifest(folder)
    files = manifest.get("files") if manifest is not None else None
    if not isinstance(files, dict) or not all(type(size) is int for size in files.values()):
        return None
    return files if all(is_inside(folder, name) for name in files) else None


def is_inside(folder: Path, name: str) -> bool:
    """Whether it names a file of the folder; what lies behind a link that leads out is none."""
    if Path(name).is_absolute() or ".." in Path(name).parts:
        return False
    return (folder / name).parent.resolve().is_relative_to(folder.resolve())


def read_manifest(folder: Path) -> Mapping[str, Any] | None:
    """The folder's manifest, None if there is none that can be read."""
    try:
        found = json.loads((folder / MANIFEST).read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def remove_listed(folder: Path, scratch: Path) -> None:
    """Delete what the folder's manifest lists; the user's files stay, and a manifest that lists nothing.

    `scratch`: a folder on the same disk for unfinished files, see `write_atomic`."""
    listed = listed_files(folder)
    if listed is None:
        return
    # Cut short at any moment, nothing of it looks whole: fingerprint and index to shards go first.
    write_atomic(folder / MANIFEST, json.dumps({"files": listed}) + "\n", scratch=scratch)
    for name in sorted(listed, key=_turn_to_go):
        (folder / name).unlink(missing_ok=True)
    for parent, _, _ in os.walk(folder, topdown=False):
        if Path(parent) != folder:
            remove_if_empty(Path(parent))
    if [path.name for path in folder.iterdir()] == [MANIFEST]:
        (folder / MANIFEST).unlink()
        folder.rmdir()
    else:
        write_atomic(folder / MANIFEST, json.dumps({"files": {}}) + "\n", scratch=scratch)


def _turn_to_go(name: str) -> int:
    return 0 if name.endswith(".index.json") else 1 if name.endswith(".safetensors") else 2


def remove_if_empty(folder: Path) -> None:
    """Delete the folder if nothing is in it."""
    if not any(folder.iterdir()):
        folder.rmdir()
