"""Putting a finished folder in its place by one rename, and tidying up after runs that died on the way.

While a folder is being made it lies in a hidden one beside its target, `.NAME.partial-XXXX`, with

    lock          held as long as the maker lives
    content/      the new folder
    old/          the folder that it replaces, from the first rename on
    done/         what is left of that one, on its way out

`content` is whole before `old` appears, so a replacement that was cut short is finished by the next run.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from itertools import chain, count
from pathlib import Path

from merging.checkpoints.atomic import sync
from merging.checkpoints.manifest import MANIFEST, listed_files, remove_if_empty
from merging.checkpoints.manifest import read_manifest as read_manifest
from merging.checkpoints.strays import is_read_as_weights
from merging.errors import OutputError

_PARTIAL = re.compile(r"\.(.+)\.partial-[0-9a-f]{8}")


class Partial:
    """A folder in the making. `content` is where its files go; `publish` or `discard` ends it."""

    def __init__(self, target: Path) -> None:
        """Raises OutputError if nothing may be put at `target`."""
        self.target = target.parent.resolve() / target.name
        if self.target.is_symlink():
            self.target = self.target.resolve()
        check_target(self.target)
        self.folder = self.target.parent / f".{self.target.name}.partial-{secrets.token_hex(4)}"
        self.content = self.folder / "content"
        try:
            self.folder.mkdir()
            self._lock: int | None = _locked(self.folder, make=True)
            self.content.mkdir()
        except OSError as error:
            raise OutputError(f"nothing can be written beside {self.target}: {error.strerror}") from error

    def publish(self) -> list[str]:
        """Move `content` to the target, with the user's files of the folder it replaces; notes on these."""
        for folder in _folders(self.content):
            sync(folder)
        old = self.folder / "old"
        notes = []
        if self.target.exists():
            if not self.target.is_dir():
                raise OutputError(f"{self.target} has become a file while the run was working")
            os.rename(self.target, old)
            sync(self.target.parent)
            notes = _carry_over(old, self.content)
        os.rename(self.content, self.target)
        sync(self.target.parent)
        self.discard()
        return notes

    def discard(self) -> None:
        """Delete what is left of the hidden folder."""
        if self._lock is not None:
            _delete(self.folder)
            self.leave()

    def leave(self) -> None:
        """Leave everything as it is, for `recover`."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def check_target(target: Path) -> None:
    """Raises OutputError unless a folder can be published there without touching what is not ours."""
    if not target.parent.is_dir():
        raise OutputError(
            f"{target.parent} is not a folder", remedy="Make it first, or choose another output path."
        )
    if not os.access(target.parent, os.W_OK | os.X_OK):
        raise OutputError(f"{target.parent} is read-only", remedy="Choose another output path.")
    if not target.exists():
        return
    if not target.is_dir():
        raise OutputError(f"{target} is a file, expected a folder", remedy="Choose another output path.")
    if not os.access(target, os.W_OK | os.X_OK):
        raise OutputError(f"{target} is read-only", remedy="Choose another output path.")
    present = sorted(path.name for path in target.iterdir())
    if present and listed_files(target) is None:
        raise OutputError(
            f"{target} is not empty and was not written by this program: {', '.join(present[:3])}",
            remedy="Move it away, or choose another output path.",
        )


def recover(target: Path) -> list[str]:
    """Finish or clean what dead runs have left beside `target`; notes on what was done."""
    target = target.parent.resolve() / target.name
    notes: list[str] = []
    for folder in sorted(target.parent.iterdir()):
        if _target_name(folder) != target.name:
            continue
        try:
            lock = _locked(folder, make=False)
        except FileNotFoundError:
            remove_if_empty(folder)  # all that a maker leaves which died at once, or while tidying up
            continue
        except BlockingIOError:
            continue  # its maker lives
        try:
            notes += _recover(folder, target)
        finally:
            os.close(lock)
    return notes


def partial_targets(folder: Path) -> list[Path]:
    """What hidden folders in `folder` were about to become."""
    names = {_target_name(path) for path in folder.iterdir()} - {None}
    return [folder / str(name) for name in sorted(filter(None, names))]


def is_partial(path: Path) -> bool:
    """Whether it is a hidden folder in which something was being made."""
    return _target_name(path) is not None and (path / "lock").is_file()


def _target_name(folder: Path) -> str | None:
    """The name of what a hidden folder was about to become, None for any other folder."""
    match = _PARTIAL.fullmatch(folder.name)
    return match[1] if match and folder.is_dir() and not folder.is_symlink() else None


def _recover(folder: Path, target: Path) -> list[str]:
    content, old = folder / "content", folder / "old"
    if links := [path.name for path in (content, old, folder / "done") if path.is_symlink()]:
        raise OutputError(
            f"{folder} has a link, {links[0]}, where a run makes a folder",
            remedy="Remove that link, then run again.",
        )
    notes: list[str] = []
    if old.exists() and not target.exists():
        if content.exists():
            notes = _carry_over(old, content)
            os.rename(content, target)
            notes.append(f"{target}: finished the replacement that an earlier run had begun")
        else:
            os.rename(old, target)
            notes.append(f"{target}: put back what an earlier run had moved away")
        sync(target.parent)
    elif old.exists() and content.exists():
        raise OutputError(
            f"{target} appeared while {folder} was about to take its place",
            remedy="Move one of the two away, then run again.",
        )
    else:
        notes.append(f"{folder}: removed, left by a run that did not end")
    _delete(folder)
    return notes


def _carry_over(old: Path, new: Path) -> list[str]:
    """Move the user's files from `old` to `new`. Can be repeated after a crash."""
    listed = listed_files(old)
    ours = {*listed, MANIFEST} if listed is not None else set()
    notes = []
    names = {path.relative_to(old).as_posix(): path for path in _files(old)}
    for name, path in sorted(names.items(), key=lambda item: not _is_free(new / item[0], new)):
        if name in ours:
            continue
        taken = path.parent == old and is_read_as_weights(path)  # never beside weights that are ours
        aside = (new / f"yours-{number}" for number in count(1))
        tops = chain([] if taken else [new], aside)
        destination = next(top / name for top in tops if _is_free(top / name, new))
        destination.parent.mkdir(parents=True, exist_ok=True)
        os.rename(path, destination)
        moved = destination.relative_to(new).as_posix()
        if moved != name:
            free = _is_free(new / name, new)
            why = "it would be read as weights of the model" if free else "its name was needed"
            notes.append(f"{name}: {why}, your file is now {moved}")
    for folder in _folders(old):
        name = folder.relative_to(old).as_posix()
        if name != "." and not any(file.startswith(f"{name}/") for file in ours):
            if _can_be_folder(new / name, new):
                (new / name).mkdir(parents=True, exist_ok=True)
            else:
                notes.append(f"{name}: its name was needed, your folder is now {_set_aside(name, new)}")
    for folder in _folders(new):
        sync(folder)
    return notes


def _is_free(path: Path, top: Path) -> bool:
    """Whether a file can be put there: nothing has its name, and no file that of a folder on the way."""
    above = [parent for parent in path.parents if parent.is_relative_to(top)]
    return not os.path.lexists(path) and all(
        parent.is_dir() or not os.path.lexists(parent) for parent in above
    )


def _can_be_folder(path: Path, top: Path) -> bool:
    """Whether there is a folder, or one can be made."""
    return path.is_dir() or _is_free(path, top)


def _set_aside(name: str, new: Path) -> str:
    """Make an empty folder of that name where there is room for it; where that is."""
    tops = (new / f"yours-{number}" for number in count(1))
    place = next(top / name for top in tops if _can_be_folder(top / name, new))
    place.mkdir(parents=True, exist_ok=True)
    return place.relative_to(new).as_posix()


def _locked(folder: Path, *, make: bool) -> int:
    """An open lock of the folder. Raises BlockingIOError if another process holds it."""
    descriptor = os.open(folder / "lock", os.O_RDWR | (os.O_CREAT if make else 0), 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _delete(folder: Path) -> None:
    """Delete a hidden folder, its lock last: what has no lock has no content either."""
    if (folder / "old").exists():
        os.rename(folder / "old", folder / "done")  # so that what is called old is always whole
    for name in ("content", "done"):
        if (folder / name).exists():
            shutil.rmtree(folder / name)
    (folder / "lock").unlink(missing_ok=True)
    remove_if_empty(folder)


def _files(folder: Path) -> Iterator[Path]:
    """Everything below the folder that is not itself a folder; links are not followed."""
    for parent, folders, files in os.walk(folder):
        yield from (Path(parent, name) for name in files)
        yield from (Path(parent, name) for name in folders if Path(parent, name).is_symlink())


def _folders(folder: Path) -> list[Path]:
    return [Path(parent) for parent, _, _ in os.walk(folder)]
