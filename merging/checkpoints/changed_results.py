"""Whether the files of a finished checkpoint are still those that the run wrote, before anything is done with
them."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch

from merging.checkpoints.hashing import FileHashes
from merging.checkpoints.manifest import MANIFEST, listed_files, read_manifest
from merging.errors import OutputError, Problem
from merging.threads import in_threads

_CARD = "README.md"  # which people write into


class Changed(NamedTuple):
    """A file, and its SHA-256 as recorded (empty where nothing is) and as found."""

    file: Path
    recorded: str
    found: str


def changed_files(checkpoint: Path, known: FileHashes) -> list[Changed]:
    """Files that the manifest lists and whose content is another now; model cards may be edited.

    `checkpoint`: finished, all files that it lists are there. `known`: so that a file that has not changed
    since it was last hashed is not read again."""
    digests = (read_manifest(checkpoint) or {}).get("sha256")
    recorded = digests if isinstance(digests, dict) else {}
    names = [name for name in listed_files(checkpoint) or () if Path(name).name != _CARD]
    found = in_threads(lambda name: known.of(checkpoint / name), names, torch.get_num_threads())
    return [
        Changed(checkpoint / name, str(recorded.get(name, "")), digest)
        for name, digest in zip(names, found, strict=True)
        if digest != recorded.get(name)
    ]


def changed_results(checkpoint: Path, changed: list[Changed]) -> OutputError:
    """The refusal to go on with that checkpoint."""
    problems = [
        Problem(
            str(one.file),
            f"has the SHA-256 {one.found}, expected {one.recorded}, which {MANIFEST} recorded"
            if one.recorded
            else f"has the SHA-256 {one.found}, and {MANIFEST} records none",
        )
        for one in changed
    ]
    return OutputError(
        f"{checkpoint} is finished, but is not what the run wrote there: its files were changed or replaced",
        problems=problems,
        remedy="Put back what the run wrote; or move these files away, or use --overwrite: then the "
        "checkpoint is made again.",
    )
