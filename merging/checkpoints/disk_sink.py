"""SafetensorsSink: a checkpoint written to disk as its tensors come, and shown only when it is whole."""

from __future__ import annotations

import errno
import json
import os
import shutil
import threading
from bisect import insort
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch import Tensor

from merging.checkpoints.atomic import sync
from merging.checkpoints.layout import INDEX, plan_layout
from merging.checkpoints.manifest import MANIFEST
from merging.checkpoints.publish import Partial
from merging.checkpoints.rounding import rounded
from merging.checkpoints.side_files import SideFiles, side_files
from merging.checkpoints.sink import CheckpointSink, row_range
from merging.checkpoints.source import CheckpointSource
from merging.checkpoints.weight_files import refuse_outside
from merging.errors import CheckpointError, MergingError, OutputError

_TIGHT = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


class SafetensorsSink(CheckpointSink):
    """Names, shapes and dtypes are those of `like`; `dtype` overrides that of floating tensors.

    The place of every byte is known beforehand, so that tensors and row blocks may come in any order and
    from several threads, each byte once, and nothing is held in memory. `close` lists all files in the
    manifest, moves the folder to `target` by one rename, and carries over what the user put into a folder
    of ours that it replaces.
    """

    def __init__(
        self,
        target: Path,
        like: CheckpointSource,
        *,
        dtype: torch.dtype | None = None,
        shard_size: int | None = None,
        side_files_from: Path | None = None,
        files: Mapping[str, str] | None = None,
        allow_nonfinite: bool = False,
    ) -> None:
        """`shard_size` in bytes, None: as in `like`. `side_files_from`: folder of config, tokenizer, ..."""
        self._like, self._allow_nonfinite = like, allow_nonfinite
        self._layout = plan_layout(like, dtype=dtype, shard_size=shard_size)
        self._files = {name: file for file, held in self._layout.places.items() for name in held}
        self._texts: dict[str, str] = {}
        for name, text in (files or {}).items():
            self.add_file(name, text)
        self._written: dict[str, list[tuple[int, int]]] = {name: [] for name in self._files}
        self._descriptors: dict[str, int] = {}
        self._lock = threading.Lock()
        self.copied = SideFiles((), ())  # which files came along, and which were left behind
        self.notes: list[str] = []
        self._partial = Partial(target)
        self.target = self._partial.target
        try:
            self._prepare(side_files_from, dtype)
        except BaseException:
            self.abort()
            raise

    def add_file(self, name: str, text: str) -> None:
        """A text file of the result, such as README.md; manifest.json gets its list of files added."""
        parts = PurePosixPath(name).parts
        if (
            not parts
            or name.startswith("/")
            or ".." in parts
            or name in self._layout.headers
            or name == INDEX
        ):
            raise OutputError(f'"{name}" cannot be the name of an additional file')
        if name == MANIFEST and not isinstance(json.loads(text), dict):
            raise OutputError(f"{MANIFEST} is not a JSON object")
        self._texts[name] = text

    def write(self, name: str, tensor: Tensor, rows: slice | None = None) -> None:
        if name not in self._files:
            raise CheckpointError(f'"{name}" is not a tensor of {self._like.label}')
        file = self._files[name]
        place = self._layout.places[file][name]
        first, last = row_range(name, place.spec, tensor, rows)
        data = rounded(tensor.detach(), place.spec.dtype, name=name, allow_nonfinite=self._allow_nonfinite)
        self._claim(name, first, last)
        row_bytes = place.spec.bytes // max(1, place.spec.shape[0] if place.spec.shape else 1)
        flat = data.cpu().contiguous().reshape(-1).view(torch.uint8)
        self._store(file, flat.numpy().data, place.start + first * row_bytes)

    def close(self) -> None:
        try:
            self._check_complete()
            for descriptor in self._descriptors.values():
                os.fsync(descriptor)
            self._write_texts()
        except OSError as error:
            self.abort()
            raise _failed(self.target, error) from error
        except BaseException:
            self.abort()
            raise
        self._close_files()
        try:
            self.notes += self._partial.publish()
        except OSError as error:  # nothing is deleted: the next run finishes or undoes it
            self._partial.leave()
            raise _failed(self.target, error) from error

    def abort(self) -> None:
        self._close_files()
        self._partial.discard()

    def _prepare(self, folder: Path | None, dtype: torch.dtype | None) -> None:
        beside: dict[str, Path] = {}
        if folder is not None:
            self.copied = side_files(folder)
            beside = {name: folder / name for name in self.copied.known}
            for file in beside.values():
                refuse_outside(folder, file)
        self._check_space(self._layout.bytes + sum(file.stat().st_size for file in beside.values()))
        try:
            for name, header in self._layout.headers.items():
                self._descriptors[name] = os.open(self._partial.content / name, os.O_RDWR | os.O_CREAT, 0o666)
                os.ftruncate(self._descriptors[name], self._layout.size(name))
                self._store(name, memoryview(header), 0)
            for name, file in beside.items():
                self._copy(file, self._partial.content / name, dtype)
        except OSError as error:
            raise _failed(self.target, error) from error

    def _check_space(self, needed: int) -> None:
        free = shutil.disk_usage(self.target.parent).free
        if needed > free:
            raise OutputError(
                f"{self.target} needs {_readable(needed)}, its disk has {_readable(free)} free",
                remedy="Make room, or choose an output path on another disk.",
            )

    def _copy(self, file: Path, destination: Path, dtype: torch.dtype | None) -> None:
        destination.parent.mkdir(parents=True, exist_ok=True)
        if file.name == "config.json" and destination.parent == self._partial.content and dtype is not None:
            config = _with_dtype(json.loads(file.read_bytes()), str(dtype).removeprefix("torch."))
            destination.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        else:
            shutil.copyfile(file, destination)

    def _claim(self, name: str, first: int, last: int) -> None:
        if first == last:
            return
        with self._lock:
            written = self._written[name]
            if any(start < last and first < stop for start, stop in written):
                raise CheckpointError(f'rows {first} to {last} of "{name}" are written twice')
            insort(written, (first, last))
            joined = [written[0]]
            for start, stop in written[1:]:
                if start == joined[-1][1]:
                    joined[-1] = (joined[-1][0], stop)
                else:
                    joined.append((start, stop))
            self._written[name] = joined

    def _store(self, file: str, data: memoryview, offset: int) -> None:
        done = 0
        try:
            while done < len(data):
                done += os.pwrite(self._descriptors[file], data[done : done + (1 << 30)], offset + done)
        except OSError as error:
            raise _failed(self.target, error) from error

    def _check_complete(self) -> None:
        short = [
            name
            for name, file in self._files.items()
            if self._layout.places[file][name].spec.elements
            and self._written[name] != [(0, (self._like.spec(name).shape or (1,))[0])]
        ]
        if short:
            names = ", ".join(short[:3])
            raise CheckpointError(f"{len(short)} tensors were not written in full; first: {names}")

    def _write_texts(self) -> None:
        content = self._partial.content
        manifest = json.loads(self._texts.pop(MANIFEST, "{}"))
        if self._layout.index is not None:
            self._texts[INDEX] = self._layout.index
        for name, text in self._texts.items():
            path = content / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        present = sorted(path for path in content.rglob("*") if path.is_file())
        manifest["files"] = {path.relative_to(content).as_posix(): path.stat().st_size for path in present}
        (content / MANIFEST).write_text(
            json.dumps(manifest, indent=2, ensure_ascii=False) + "\n", encoding="utf-8"
        )
        for path in (*present, content / MANIFEST):
            sync(path)

    def _close_files(self) -> None:
        while self._descriptors:
            os.close(self._descriptors.popitem()[1])


def _with_dtype(config: Any, dtype: str) -> Any:
    """The config, its own and its parts' dtypes replaced."""

    def replaced(part: Any) -> Any:
        if not isinstance(part, dict):
            return part
        return {
            key: dtype if key in ("dtype", "torch_dtype") and isinstance(value, str) else replaced(value)
            for key, value in part.items()
        }

    config = replaced(config)
    if not isinstance(config.get("dtype", config.get("torch_dtype")), str):
        config["dtype"] = dtype
    return config


def _failed(target: Path, error: OSError) -> MergingError:
    if error.errno in _TIGHT:
        return MergingError(
            f"no room to write {target}: {error.strerror}; unfinished files are removed",
            remedy="Make room, or choose an output path on another disk.",
        )
    return MergingError(f"{target} cannot be written: {error.strerror or error}")


def _readable(size: int) -> str:
    for unit in ("bytes", "KB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1000  # type: ignore[assignment]
    return f"{size:.1f} TB"
