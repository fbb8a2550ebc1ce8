"""RunFolder: the output folder of a run. One run at a time; what is the user's stays the user's."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from types import TracebackType
from typing import Any

from merging.checkpoints.atomic import write_atomic as write_atomic
from merging.checkpoints.differences import differences
from merging.checkpoints.kept_manifests import kept_manifest, put_back_manifest
from merging.checkpoints.manifest import MANIFEST, listed_files, read_manifest, remove_listed
from merging.checkpoints.publish import is_partial, partial_targets, recover
from merging.checkpoints.unfit_places import refuse_unlisted
from merging.errors import OutputError, Problem
from merging.file_names import too_long
from merging.spec.wording import shortened

_HIDDEN = ".merging"
CARD = "README.md"  # gets its scores after all else is finished, and people write into it
_CHECKPOINTS = ("merged", "calibrated")
_RESERVED = ("merged", "calibrated", "heads", "report.json", "report.html")  # what a run may want to write
_RECORDS = ("state.json", "report-of", MANIFEST, *(kept_manifest(Path(), name).name for name in _CHECKPOINTS))


class RunFolder:
    """`open` it before any work, `close` it at the end (or use `with`, after `open`).

    `.merging/state.json` remembers the spec and everything that runs made here (`claim`); `.merging/lock` is
    held while a run works.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: int | None = None
        self._owned: list[str] = []
        self._state: dict[str, Any] = {}
        self.overwrite = False  # whether finished checkpoints that were changed since may be made again
        self.remarks: tuple[str, ...] = ()  # on what was lost, put back or tidied up, for the report

    def open(self, fingerprint: str, spec: Mapping[str, Any], *, overwrite: bool = False) -> list[str]:
        """Make the folder ours, or go on with a run of the same fingerprint; notes on what was tidied up.

        Raises OutputError if another run works here, if it was made from another spec, or if it holds files
        that are not ours, unless `overwrite`: then what earlier runs made is removed, and nothing else.
        """
        self.check()
        self.overwrite = overwrite
        self._refuse_unfit_state()
        if self.path.exists() and self._read_state() is None:
            self._refuse_foreign(overwrite)
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self.state.mkdir(exist_ok=True)
        except OSError as error:
            raise OutputError(f"nothing can be written in {self.path}: {error.strerror}") from error
        self._acquire()
        try:
            notes = [note for target in partial_targets(self.path) for note in recover(target)]
            self._drop_odd_records()
            before = self._read_state()
            same = before is not None and before.get("fingerprint") == fingerprint
            if before is not None and not same and not overwrite:
                raise _other_spec(self.path, before.get("spec"), spec)
            notes += [
                f"{self.path / name}: its manifest was gone or damaged, and is put back"
                for name in (before["owned"] if before is not None else ())
                if name in _CHECKPOINTS and put_back_manifest(self.state, self.path / name)
            ]
            self.remarks = tuple(notes)
            if before is not None and not same:
                self._owned = before["owned"]
                for name in _CHECKPOINTS:  # before anything is removed
                    self.refuse_unlisted(name)
                self._remove(before["owned"])
            if not same or self.begun.is_symlink() or not self.begun.is_dir():
                _delete(self.begun)
            known = before["owned"] if before is not None else []
            self._owned = [name for name in known if same or (self.path / name).exists()]
            self._state = {"fingerprint": fingerprint, "spec": dict(spec)}
            self._save_state()
            _delete(self.work)
            self.work.mkdir()
            for file in self.state.glob("*.tmp"):
                _delete(file)
        except BaseException:
            self.close()
            raise
        return notes

    def check(self) -> None:
        """Raises OutputError if nothing can be written there; changes nothing."""
        path = self.path
        if unfit := too_long(path):
            raise OutputError(
                f"{shortened(str(path))} cannot be an output folder: {unfit}",
                remedy="Choose another output path.",
            )
        try:
            os.lstat(path / _HIDDEN / "state.json")  # the longest of the names that are sure to be wanted
        except (FileNotFoundError, NotADirectoryError, PermissionError):
            pass  # told below, or to be made
        except (OSError, ValueError) as error:  # longer than any file system takes, or links in a ring
            reason = error.strerror if isinstance(error, OSError) else error
            raise OutputError(
                f"{shortened(str(path))} cannot be an output folder: {reason}",
                remedy="Choose another output path: names of up to 200 characters, and links that lead to "
                "a folder.",
            ) from error
        lost = next((part for part in (path, *path.parents) if part.is_symlink() and not part.exists()), None)
        if lost is not None:
            raise OutputError(
                f'{lost} is a link to "{shortened(os.readlink(lost))}", which is not there',
                remedy="Remove the link, make the folder that it leads to, or choose another output path.",
            )
        if path.exists() and not path.is_dir():
            raise OutputError(f"{path} is a file, expected a folder", remedy="Choose another output path.")
        place = next(part for part in (path, *path.parents) if part.exists())
        if not place.is_dir():
            raise OutputError(f"{path} cannot be made: {place} is a file", remedy="Choose another path.")
        if not os.access(place, os.W_OK | os.X_OK):
            raise OutputError(f"{place} is read-only", remedy="Choose another output path.")

    @property
    def owned(self) -> tuple[str, ...]:
        """Everything that runs made here, by its name in the folder."""
        return tuple(self._owned)

    @property
    def state(self) -> Path:
        """Where a run may keep small files of its own between runs."""
        return self.path / _HIDDEN

    @property
    def work(self) -> Path:
        """Where a run may keep large files while it works; empty when it starts."""
        return self.path / _HIDDEN / "work"

    @property
    def begun(self) -> Path:
        """Where a run keeps what the next one can go on with, if it does not end; for runs of one spec."""
        return self.path / _HIDDEN / "begun"

    def forget(self, step: str) -> None:
        """Remove what was begun of a step, or of its parts (`step-0`, ...), that is done."""
        for folder in self.begun.glob(f"{step}*"):
            _delete(folder)

    def close(self) -> None:
        """Let other runs work here."""
        if self._lock is not None:
            shutil.rmtree(self.work, ignore_errors=True)
            os.close(self._lock)
            self._lock = None

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def claim(self, name: str) -> Path:
        """Remember, before making it, that a file or checkpoint folder is ours; its path."""
        _check_relative(name)
        self._refuse_outside(name)
        if name not in self._owned:
            self._owned.append(name)
            self._save_state()
        return self.path / name

    def stage_done(self, name: str, fingerprint: str) -> bool:
        """Whether OUT/name was finished with that fingerprint and all its files are still there, whole."""
        folder = self.path / name
        manifest, files = read_manifest(folder), listed_files(folder)
        if manifest is None or files is None or manifest.get("fingerprint") != fingerprint:
            return False
        paths = {folder / file: size for file, size in files.items()}
        return all(
            path.is_file() and (path.name == CARD or path.stat().st_size == size)
            for path, size in paths.items()
        )

    def refuse_unlisted(self, name: str) -> None:
        """Raise OutputError where a run began OUT/name, and nothing tells which files in it are ours."""
        if name in self._owned:
            refuse_unlisted(self.path / name, kept_manifest(self.state, name))

    def undo(self, name: str) -> None:
        """Remove what was finished of OUT/name, so that it is made again; the user's own files stay."""
        self._refuse_outside(name)
        remove_listed(self.path / name, self.state)
        kept_manifest(self.state, name).unlink(missing_ok=True)

    def write_atomic(self, name: str, text: str) -> Path:
        """Write a small file of ours so that it is there whole or as it was before."""
        path = self.claim(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, text, scratch=self.state)
        return path

    def _acquire(self) -> None:
        place = self.state / "lock"
        try:
            # Not through a link, and without waiting for the other end of a pipe.
            lock = os.open(place, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644)
        except OSError as error:
            what = "is a link" if place.is_symlink() else f"cannot be opened: {error.strerror}"
            raise OutputError(
                f"{place} {what}", remedy="Remove it, or choose another output path."
            ) from error
        if not stat.S_ISREG(os.fstat(lock).st_mode):
            os.close(lock)
            raise OutputError(
                f"{place} is no ordinary file", remedy="Remove it, or choose another output path."
            )
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pid = os.pread(lock, 20, 0).decode("ascii", "replace").strip() or "unknown"
            os.close(lock)
            raise OutputError(
                f"another run (pid {pid}) is working in {self.path}",
                remedy="Wait until it has ended, or choose another output path.",
            ) from None
        os.ftruncate(lock, 0)
        os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
        self._lock = lock

    def _read_state(self) -> dict[str, Any] | None:
        found = _read_state(self.state)
        for name in found["owned"] if found is not None else ():
            _check_relative(name)
            if PurePosixPath(name).parts[0] not in _RESERVED:
                raise OutputError(
                    f'{self.state / "state.json"} says that a run made "{shortened(name)}", expected only '
                    f"{', '.join(_RESERVED)} and what lies in them",
                    remedy="It was changed by hand: put it back, or choose another output path.",
                )
        return found

    def _save_state(self) -> None:
        content = {**self._state, "owned": self._owned}
        text = json.dumps(content, indent=2, ensure_ascii=False, default=str) + "\n"
        write_atomic(self.state / "state.json", text)

    def _refuse_unfit_state(self) -> None:
        """Raise OutputError where a run's own folder, or one of its records, is of another kind."""
        if self.state.is_symlink():
            raise OutputError(f"{self.state} is a link", remedy="Remove it, or choose another output path.")
        if self.state.exists() and not self.state.is_dir():
            raise OutputError(
                f"{self.state} is a file, expected the folder in which a run keeps its records",
                remedy="Remove it, or choose another output path.",
            )
        for name in _RECORDS:
            if (self.state / name).is_dir() and not (self.state / name).is_symlink():
                raise OutputError(
                    f"{self.state / name} is a folder, expected a file that a run wrote",
                    remedy="Move it away, or choose another output path.",
                )

    def _drop_odd_records(self) -> None:
        """Links and pipes where a run keeps records: nothing is read or written through them."""
        for name in _RECORDS:
            file = self.state / name
            if file.is_symlink() or (os.path.lexists(file) and not file.is_file()):
                file.unlink()

    def _refuse_foreign(self, overwrite: bool) -> None:
        """What is there was not made by a run: nothing may lie under the names that a run writes."""
        present = sorted(
            path.name for path in self.path.iterdir() if path.name != _HIDDEN and not is_partial(path)
        )
        taken = [name for name in _RESERVED if name in present]
        if taken and self._was_made_by_a_run(taken):
            self._refuse_without_record(taken)
        if present and not overwrite:
            shown = ", ".join(present[:3]) + (", ..." if len(present) > 3 else "")
            raise OutputError(
                f"{self.path} is not empty and was not made by a run: {shown}",
                remedy="Choose another output path."
                if taken
                else "Choose another output path, or use --overwrite; these files stay as they are.",
            )
        if taken:
            raise OutputError(
                f"{self.path} holds {', '.join(taken)}, which a run needs to write and did not make",
                remedy="Move it away, or choose another output path.",
            )

    def _was_made_by_a_run(self, taken: Sequence[str]) -> bool:
        """By what lies there, though no record tells it."""
        manifests = (read_manifest(self.path / name) for name in taken if name in _CHECKPOINTS)
        return any("fingerprint" in (one or {}) for one in manifests) or (self.state / "lock").is_file()

    def _refuse_without_record(self, taken: Sequence[str]) -> None:
        record, names = self.state / "state.json", ", ".join(taken)
        state = "is damaged" if os.path.lexists(record) else "is gone"
        raise OutputError(
            f"{self.path} holds {names}, and the record of what runs made there, {record}, {state}: nothing "
            "tells these from files of yours",
            remedy=f"Put the record back; or move {names} away, or choose another output path, and they are "
            "made again. Checkpoints stay good: `merging verify` compares them with their manifests.",
        )

    def _refuse_outside(self, name: str) -> None:
        path = self.path / name
        if not path.parent.resolve().is_relative_to(self.path.resolve()):
            raise OutputError(
                f"{path} lies behind a link that leads out of {self.path}",
                remedy="Remove the link, or choose another output path.",
            )

    def _remove(self, owned: list[str]) -> None:
        for name in reversed(owned):  # what tells of others goes before them
            path = self.path / name
            self._refuse_outside(name)
            if path.is_symlink() or path.is_file():
                path.unlink()
            elif path.is_dir():
                remove_listed(path, self.state)
            if name in _CHECKPOINTS:
                kept_manifest(self.state, name).unlink(missing_ok=True)
            for parent in PurePosixPath(name).parents:
                folder = self.path / parent
                if parent.parts and folder.is_dir() and not folder.is_symlink() and not any(folder.iterdir()):
                    folder.rmdir()


def owned(folder: Path) -> tuple[str, ...]:
    """Everything that runs made in that folder, by its name there; nothing where it is no run's."""
    found = _read_state(folder / _HIDDEN)
    return tuple(found["owned"]) if found is not None else ()


def _read_state(folder: Path) -> dict[str, Any] | None:
    file = folder / "state.json"
    if file.is_symlink() or not file.is_file():  # a pipe would be waited for without end
        return None
    try:
        found = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    names = found.get("owned") if isinstance(found, dict) else None
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        return None
    return found


def _delete(folder: Path) -> None:
    """With everything in it; of a link only the link. What is there need be no folder."""
    if folder.is_symlink() or (os.path.lexists(folder) and not folder.is_dir()):
        folder.unlink(missing_ok=True)
    else:
        shutil.rmtree(folder, ignore_errors=True)


def _other_spec(path: Path, before: Any, now: Mapping[str, Any]) -> OutputError:
    unchanged = Problem("", "the spec is the same, the models or data that it names have changed")
    return OutputError(
        f"{path} was made from another spec",
        problems=differences(before, now) or [unchanged],
        remedy="Choose another output path, or use --overwrite to replace what that run made.",
    )


def _check_relative(name: str) -> None:
    path = PurePosixPath(name)
    if not path.parts or path.is_absolute() or ".." in path.parts or path.parts[0] == _HIDDEN:
        raise OutputError(f'"{name}" is not the name of something in the output folder')
