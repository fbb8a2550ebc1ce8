"""amend_, relist_: replace one text file of ours in a folder that is already published, and what the manifest
says of it."""

from __future__ import annotations

import json
from pathlib import Path

from merging.checkpoints.atomic import write_atomic
from merging.checkpoints.manifest import MANIFEST, listing, read_manifest


def amend_(folder: Path, name: str, text: str, *, scratch: Path, manifest: Path | None = None) -> None:
    """`scratch`: as in `write_atomic`. `manifest`: the folder that it lies in, if not this one.

    After a kill between the two writes the file is unlike its manifest: amend it again."""
    file = folder / name
    if not file.is_file() or file.read_text(encoding="utf-8") != text:
        write_atomic(file, text, scratch=scratch)
    relist_(folder, name, scratch=scratch, manifest=manifest)


def relist_(folder: Path, name: str, *, scratch: Path, manifest: Path | None = None) -> None:
    """Let the manifest say what that file is now, if it lists it. Arguments as of `amend_`."""
    about = read_manifest(manifest or folder)
    if about is None or not (folder / name).is_file():
        return
    now = listing(folder, [folder / name])
    changed = {key: {**about[key], **entries} for key, entries in now.items() if name in about.get(key, {})}
    if all(about[key] == entries for key, entries in changed.items()):
        return
    text = json.dumps({**about, **changed}, indent=2, ensure_ascii=False) + "\n"
    write_atomic((manifest or folder) / MANIFEST, text, scratch=scratch)
