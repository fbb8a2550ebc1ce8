"""Copies of checkpoints' manifests in the run's own folder: without its manifest nobody knows what of a
folder is ours, and a run can neither go on with it nor replace it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from merging.checkpoints.atomic import write_atomic
from merging.checkpoints.hashing import hashes
from merging.checkpoints.manifest import FORMAT, MANIFEST, is_inside, read_manifest

_CARD = "README.md"  # which people write into


def kept_manifest(state: Path, name: str) -> Path:
    """Where the copy lies of the manifest of OUT/name. `state`: OUT/.merging."""
    return state / f"manifest-of-{name}.json"


def keep_manifest(state: Path, checkpoint: Path) -> None:
    """Copy the manifest of a checkpoint as it is now, if it has one."""
    file, place = checkpoint / MANIFEST, kept_manifest(state, checkpoint.name)
    if checkpoint.is_symlink() or not file.is_file():
        return
    text = file.read_text(encoding="utf-8")
    if place.is_file() and place.read_text(encoding="utf-8", errors="replace") == text:
        return
    write_atomic(place, text, scratch=state)


def put_back_manifest(state: Path, checkpoint: Path) -> bool:
    """Write the manifest of a checkpoint anew where somebody removed it, or where it is empty or cut and all
    files that the copy lists are there; whether it was.

    Not where a file of a name that it lists is another one now: that may be somebody's own."""
    place = kept_manifest(state, checkpoint.name)
    if checkpoint.is_symlink() or not checkpoint.is_dir():  # nothing is written through a link
        return False
    damaged = os.path.lexists(checkpoint / MANIFEST)
    if damaged and not _unreadable(checkpoint):
        return False
    if not any(checkpoint.iterdir()):
        return False
    recorded = _recorded(place, checkpoint)
    if recorded is None:
        return False
    names = [name for name in recorded if name != _CARD]
    present = [checkpoint / name for name in names if (checkpoint / name).is_file()]
    if damaged and len(present) < len(names):
        return False
    found = hashes(present)
    if any(found[str(file)] != recorded[file.relative_to(checkpoint).as_posix()] for file in present):
        return False
    write_atomic(checkpoint / MANIFEST, place.read_text(encoding="utf-8"), scratch=state)
    return True


def _unreadable(checkpoint: Path) -> bool:
    """Whether its manifest is a file that says nothing at all."""
    file = checkpoint / MANIFEST
    return file.is_file() and not file.is_symlink() and not read_manifest(checkpoint)


def _recorded(place: Path, checkpoint: Path) -> dict[str, str] | None:
    """File -> SHA-256 by the copy; None if there is none that can be believed."""
    try:
        about: Any = json.loads(place.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    files = about.get("files") if isinstance(about, dict) else None
    digests = about.get("sha256") if isinstance(about, dict) else None
    if isinstance(about, dict) and about.get("format", FORMAT) != FORMAT:
        return None
    if not isinstance(files, dict) or not isinstance(digests, dict) or set(files) != set(digests):
        return None
    whole = all(type(size) is int for size in files.values()) and all(
        isinstance(digest, str) for digest in digests.values()
    )
    return digests if whole and all(is_inside(checkpoint, name) for name in digests) else None
