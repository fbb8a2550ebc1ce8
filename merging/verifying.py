"""verify: whether what a run read, and what it wrote, is still what its manifest says."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, Literal, NamedTuple

from merging.arguments import PLACE, checked
from merging.checkpoints.hashing import hashes
from merging.checkpoints.kept_manifests import kept_manifest
from merging.checkpoints.manifest import FORMAT, MANIFEST
from merging.checkpoints.run_folder import owned
from merging.checkpoints.strays import strays
from merging.errors import CheckpointError
from merging.report.entry import Entry
from merging.spec.text import json_value
from merging.spec.wording import shortened

_DIGEST = re.compile(r"[0-9a-f]{64}")
_CHECKPOINTS, _STATE = ("merged", "calibrated"), ".merging"  # in the folder of a run, where manifests lie

State = Literal["unchanged", "changed", "missing", "added"]
"""`added`: weights that lie beside those of a checkpoint, and that its manifest does not list."""


class VerifiedFile(Entry):
    """A file and its SHA-256, as recorded and as found."""

    file: str
    path: str
    state: State
    recorded: str
    found: str = ""


class VerifiedGroup(Entry):
    """Files that belong together: one input, or one result."""

    what: str
    """`base`, `expert "NAME"`, `task "NAME": calibration`, ..., or `written: merged`."""
    model: str = ""
    revision: str | None = None
    manifest: str = ""
    """The file that the recorded hashes are from."""
    files: tuple[VerifiedFile, ...]

    @property
    def differing(self) -> tuple[VerifiedFile, ...]:
        return tuple(file for file in self.files if file.state != "unchanged")


class Verified(Entry):
    """What became of every file that the manifests of a folder record."""

    folder: str
    unchanged: bool
    groups: tuple[VerifiedGroup, ...]
    notes: tuple[str, ...] = ()
    """What was not checked, and what to do."""


class _Group(NamedTuple):
    what: str
    model: str
    revision: str | None
    files: Mapping[str, tuple[Path, str]]  # name -> where it lies, SHA-256 recorded
    manifest: str = ""


@checked(folder=PLACE)
def verify(folder: Path | str) -> Verified:
    """Hash every file anew that a run read or wrote. `folder`: that of a run, or one checkpoint of it, whose
    manifest is compared to what the run recorded of it; in a copy of that alone the manifest is believed.

    Raises CheckpointError where there is no manifest, or one that cannot be understood."""
    folder = Path(folder).absolute()
    groups: list[_Group] = []
    for manifest, home in _manifests(folder):
        known = [one._replace(manifest="") for one in groups]
        groups += (group for group in _groups(manifest, home) if group._replace(manifest="") not in known)
    groups += _by_the_run(folder)
    groups += _without_manifest(folder, groups)
    present = {path for group in groups for path, _ in group.files.values() if _is_file(path, folder)}
    digests = _hashed(sorted(present))
    found = tuple(_verified(group, digests) for group in groups)
    same = not any(group.differing for group in found)
    return Verified(folder=str(folder), unchanged=same, groups=found, notes=_notes(folder))


def _is_file(path: Path, folder: Path) -> bool:
    """Raises CheckpointError for a path that no run can have recorded."""
    try:
        return path.is_file()
    except (OSError, ValueError, RuntimeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise CheckpointError(
            f"a manifest of {folder} names a file that cannot be looked at: {shortened(str(path))}: {reason}",
            remedy="It was changed by hand, or by another version: make the checkpoint again.",
        ) from error


def _hashed(paths: list[Path]) -> dict[str, str]:
    try:
        return hashes(paths)
    except OSError as error:
        raise CheckpointError(
            f"{error.filename or 'a file'} cannot be read: {error.strerror or error}",
            remedy="Make it readable, then verify again.",
        ) from error


def _verified(group: _Group, digests: Mapping[str, str]) -> VerifiedGroup:
    files = []
    for name, (path, recorded) in group.files.items():
        found = digests.get(str(path), "")
        state: State = "missing" if not found else "unchanged" if found == recorded else "changed"
        if not recorded and os.path.lexists(path):
            state = "added"
        files.append(VerifiedFile(file=name, path=str(path), state=state, recorded=recorded, found=found))
    return VerifiedGroup(
        what=group.what,
        model=group.model,
        revision=group.revision,
        manifest=group.manifest,
        files=tuple(files),
    )


def _manifests(folder: Path) -> list[tuple[Path, Path]]:
    """That of a checkpoint, or those of a run, each with the folder whose files it lists."""
    try:
        there = folder.is_dir()
    except (OSError, ValueError) as error:  # longer than any file system takes, or links in a ring
        reason = error.strerror if isinstance(error, OSError) else error
        raise CheckpointError(
            f"{shortened(str(folder))} cannot be looked at: {reason}",
            remedy="Give the output folder of a run.",
        ) from error
    if not there:
        what = "is a file, expected a folder" if folder.exists() else "does not exist"
        raise CheckpointError(f"{folder} {what}", remedy="Give the output folder of a run.")
    if (folder / MANIFEST).is_file():
        return [(folder / MANIFEST, folder)]
    if (kept := _kept(folder)) is not None:
        return [(kept, folder)]
    found = []
    for place in _CHECKPOINTS:
        if (folder / place / MANIFEST).is_file():
            found.append((folder / place / MANIFEST, folder / place))
        elif (kept := _kept(folder / place)) is not None:
            found.append((kept, folder / place))
    if (folder / _STATE / MANIFEST).is_file():
        found.append((folder / _STATE / MANIFEST, folder))
    if not found and not _without_manifest(folder, ()):
        raise CheckpointError(
            f"{folder} has no {MANIFEST}, and neither has a merged/ or calibrated/ in it: it is not "
            "the finished result of a run",
            remedy="Give the output folder of a run, or a checkpoint in it; a run that was stopped goes on "
            "with the same command.",
        )
    return found


def _kept(checkpoint: Path) -> Path | None:
    """The run's own copy of a checkpoint's manifest, where that is gone from a checkpoint that is there."""
    copy = kept_manifest(checkpoint.parent / _STATE, checkpoint.name)
    ours = checkpoint.name in _CHECKPOINTS and copy.is_file()
    return copy if ours and checkpoint.is_dir() and any(checkpoint.iterdir()) else None


def _by_the_run(folder: Path) -> list[_Group]:
    """What the run recorded of the manifest of one of its checkpoints, which may have been changed since."""
    record, name = folder.parent / _STATE / MANIFEST, f"{folder.name}/{MANIFEST}"
    if folder.name not in _CHECKPOINTS or not record.is_file():
        return []
    recorded = _written(record, folder.parent, _read(record)).get(name)
    if recorded is None:
        return []
    return [_Group(f"manifest of {folder.name}, by its run", "", None, {name: recorded}, str(record))]


def _notes(folder: Path) -> tuple[str, ...]:
    """What there is no record of."""
    if owned(folder):
        if (folder / _STATE / MANIFEST).is_file():
            return ()
        return (
            f"report, heads, test examples and the manifests themselves were not checked: {folder / _STATE} "
            "has no record of them. The run has not ended, or it was removed; run it again.",
        )
    if (folder.parent / _STATE / MANIFEST).is_file() and folder.name in _CHECKPOINTS:
        return ()
    return (
        f"checked by its own {MANIFEST} alone: no record of a run lies beside {folder}, so that nothing says "
        "whether this is the manifest that the run wrote.",
    )


def _without_manifest(folder: Path, known: Sequence[_Group]) -> list[_Group]:
    """Checkpoints of a run that lie there and say nothing of themselves, unless their manifests are among
    what is looked for anyway."""
    looked_for = {path for group in known for path, _ in group.files.values()}
    manifests = [folder / place / MANIFEST for place in owned(folder) if place in _CHECKPOINTS]
    return [
        _Group(f"written: {file.parent.name}", "", None, {MANIFEST: (file, "")})
        for file in manifests
        if not (file in looked_for or file.is_file()) and file.parent.is_dir() and any(file.parent.iterdir())
    ]


def _groups(manifest: Path, home: Path) -> Iterator[_Group]:
    found = _read(manifest)
    of_run = manifest == home / _STATE / MANIFEST
    if type(form := found.get("format", FORMAT)) is not int or form != FORMAT:
        what = f'has the "format" {shortened(json.dumps(form))}, expected {FORMAT}'
        raise _broken(manifest, what)
    stage = "report, heads and manifests" if of_run else str(found.get("stage") or home.name)
    files = _written(manifest, home, found)
    if not of_run:
        files |= {file.name: (file, "") for file in strays(home, files.keys())}
    yield _Group(f"written: {stage}", "", None, files, str(manifest))
    if not of_run and not found.get("inputs"):
        raise _broken(manifest, 'records no "inputs", which every checkpoint has')
    for part in ("inputs", "data"):
        for role, given in _object(manifest, part, found.get(part, {})).items():
            yield _input(manifest, f"{part}.{role}", role, given)


def _read(manifest: Path) -> Mapping[str, Any]:
    try:
        found = json_value(manifest.read_bytes().decode())
    except OSError as error:
        raise CheckpointError(f"{manifest} cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise _broken(manifest, f"is not valid JSON: {shortened(str(error))}") from error
    return _object(manifest, "", found)


def _written(manifest: Path, home: Path, found: Mapping[str, Any]) -> dict[str, tuple[Path, str]]:
    sizes, digests = (_object(manifest, part, found.get(part, {})) for part in ("files", "sha256"))
    if not sizes:
        raise _broken(manifest, 'lists no "files"')
    if lacking := sorted(set(sizes) - set(digests)):
        raise _broken(manifest, f'has no "sha256" of {lacking[0]}')
    files = {}
    for name, digest in digests.items():
        _refuse_outside(manifest, name)
        files[name] = (home / name, _digest(manifest, f"sha256.{name}", digest))
    return files


def _input(manifest: Path, where: str, role: str, given: Any) -> _Group:
    given = _object(manifest, where, given)
    model, folder, revision = given.get("model"), given.get("path"), given.get("revision")
    if not isinstance(model, str) or not isinstance(folder, str) or not isinstance(revision, str | None):
        raise _broken(manifest, f'has no "model" and "path" in {where}, or no text there')
    files = {}
    for name, about in _object(manifest, f"{where}.files", given.get("files")).items():
        _refuse_outside(manifest, name)
        digest = _object(manifest, f"{where}.files.{name}", about).get("sha256")
        files[name] = (Path(folder) / name, _digest(manifest, f"{where}.files.{name}", digest))
    return _Group(role, model, revision, files, str(manifest))


def _refuse_outside(manifest: Path, name: str) -> None:
    path = PurePosixPath(name)
    if not path.parts or path.is_absolute() or ".." in path.parts:
        raise _broken(manifest, f'lists "{name}", which is not in its folder')


def _object(manifest: Path, where: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        place = f" at {where}" if where else ""
        raise _broken(manifest, f"holds a {type(value).__name__}{place}, expected an object")
    return value


def _digest(manifest: Path, where: str, value: Any) -> str:
    if not isinstance(value, str) or not _DIGEST.fullmatch(value):
        raise _broken(manifest, f"has no SHA-256 at {where}, expected 64 hexadecimal digits")
    return value


def _broken(manifest: Path, what: str) -> CheckpointError:
    again = "make the checkpoint again."
    if manifest.parent.name == _STATE:  # a record of the run, which is no part of a checkpoint
        again = "run the same spec again, which makes this record anew."
        lost = next((name for name in _CHECKPOINTS if kept_manifest(manifest.parent, name) == manifest), None)
        if lost is not None:  # nothing tells any more which files of that checkpoint are the run's
            place = manifest.parent.parent / lost
            again = f"move {place} away, then run the same spec again, which makes it anew."
    remedy = f"It was changed by hand, or by another version: {again}"
    return CheckpointError(f"{manifest} {what}", remedy=remedy)
