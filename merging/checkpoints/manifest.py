"""The manifest of a folder that this program wrote: its list of files tells what is ours from what is not."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from merging.checkpoints.atomic import write_atomic

MANIFEST = "manifest.json"


def listed_files(folder: Path) -> dict[str, int] | None:
    """File -> bytes, of all files of ours in that folder by its manifest; None if it has none of ours."""
    manifest = read_manifest(folder)
    files = manifest.get("files") if manifest is not None else None
    if not isinstance(files, dict) or not all(type(size) is int for size in files.values()):
        return None
    inside = all(not Path(name).is_absolute() and ".." not in Path(name).parts for name in files)
    return files if inside else None


def read_manifest(folder: Path) -> Mapping[str, Any] | None:
    """The folder's manifest, None if there is none that can be read."""
    try:
        found = json.loads((folder / MANIFEST).read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def remove_listed(folder: Path) -> None:
    """Delete what the folder's manifest lists; the user's files stay, and a manifest that lists nothing."""
    listed = listed_files(folder)
    if listed is None:
        return
    for name in listed:
        (folder / name).unlink(missing_ok=True)
    for parent, _, _ in os.walk(folder, topdown=False):
        if Path(parent) != folder:
            remove_if_empty(Path(parent))
    if [path.name for path in folder.iterdir()] == [MANIFEST]:
        (folder / MANIFEST).unlink()
        folder.rmdir()
    else:
        write_atomic(folder / MANIFEST, json.dumps({"files": {}}) + "\n")


def remove_if_empty(folder: Path) -> None:
    """Delete the folder if nothing is in it."""
    if not any(folder.iterdir()):
        folder.rmdir()
