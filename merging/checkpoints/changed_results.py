"""Whether the files of a finished checkpoint are still those that the run wrote, before anything is done with
them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from merging.checkpoints.hashing import FileHashes
from merging.checkpoints.manifest import MANIFEST, listed_files, read_manifest
from merging.errors import OutputError, Problem
from merging.threads import in_threads

PLUGINS = "plugins"
"""Among the notes in the manifest of a calibrated checkpoint: its files in OUT/heads, with their SHA-256."""
_CARD = "README.md"  # which people write into


class Changed(NamedTuple):
    """A file, and its SHA-256 as recorded (empty where nothing is) and as found."""

    file: Path
    recorded: str
    found: str


def changed_files(checkpoint: Path, known: FileHashes) -> list[Changed]:
    """Files that the manifest lists and whose content is another now; not those that are gone. Model cards
    may be edited.

    `known`: so that a file that has not changed since it was last hashed is not read again."""
    digests = (read_manifest(checkpoint) or {}).get("sha256")
    recorded = digests if isinstance(digests, dict) else {}
    listed = [name for name in listed_files(checkpoint) or () if Path(name).name != _CARD]
    names = [name for name in listed if (checkpoint / name).is_file()]
    found = in_threads(lambda name: known.of(checkpoint / name), names, torch.get_num_threads())
    return [
        Changed(checkpoint / name, str(recorded.get(name, "")), digest)
        for name, digest in zip(names, found, strict=True)
        if digest != recorded.get(name)
    ]


def changed_heads(
    out: Path, state: Path, calibrated: Path | None, owned: Iterable[str], known: FileHashes
) -> list[Changed]:
    """Files in OUT/heads that are not those that the last run to end recorded; not those that are gone.

    `state`: OUT/.merging; `calibrated`: if it is done, so that its plug-ins are known where that run did not
    end; `owned`: what runs made in OUT; `known`: as of `changed_files`."""
    notes = (read_manifest(calibrated) or {}).get("notes") if calibrated is not None else None
    plugins = notes.get(PLUGINS) if isinstance(notes, dict) else None
    recorded: dict[str, Any] = {}
    for digests in (plugins, (read_manifest(state) or {}).get("sha256")):
        recorded |= digests if isinstance(digests, dict) else {}
    names = [name for name in owned if name.startswith("heads/") and name in recorded]
    found = [(name, known.of(out / name)) for name in names if (out / name).is_file()]
    return [Changed(out / name, str(recorded[name]), now) for name, now in found if now != recorded[name]]


def changed_results(checkpoint: Path, changed: list[Changed]) -> OutputError:
    """The refusal to go on with that checkpoint, or with OUT/heads."""
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
        remedy="Put back what the run wrote; or move these files away, or use --overwrite: then they are "
        "made again.",
    )
