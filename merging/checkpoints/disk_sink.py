"""SafetensorsSink: a checkpoint written to disk as its tensors come, and shown only when it is whole."""

from __future__ import annotations

import errno
import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch import Tensor

from merging.checkpoints.atomic import sync
from merging.checkpoints.layout import INDEX, Layout, plan_layout
from merging.checkpoints.manifest import MANIFEST, listing
from merging.checkpoints.publish import Partial
from merging.checkpoints.side_files import SideFiles, side_files
from merging.checkpoints.sink import CheckpointSink, nothing_to_check
from merging.checkpoints.source import CheckpointSource
from merging.checkpoints.weight_files import refuse_outside
from merging.checkpoints.weight_writer import Ranges, WeightWriter
from merging.errors import MergingError, OutputError
from merging.want_of_room import LARGER

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
        single_file: str | None = None,
    ) -> None:
        """`shard_size` in bytes, None: as in `like`. `side_files_from`: folder of config, tokenizer, ...

        `single_file`: name of the one file that holds all tensors, for libraries that look for it."""
        self._layout = plan_layout(like, dtype=dtype, shard_size=shard_size, single_file=single_file)
        self._texts: dict[str, str] = {}
        for name, text in (files or {}).items():
            self.add_file(name, text)
        self.copied = SideFiles((), ())  # which files came along, and which were left behind
        self.notes: list[str] = []
        self.check: Callable[[Path], None] = nothing_to_check  # of the whole folder, before it is published
        self._partial = Partial(target)
        self.target = self._partial.target
        self._writer = WeightWriter(
            like, self._layout, self._partial.content, allow_nonfinite=allow_nonfinite
        )
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
        try:
            self._writer.write(name, tensor, rows)
        except OSError as error:
            raise _failed(self.target, error) from error

    @property
    def folder(self) -> Path:
        """Where the files lie until they are published; other processes may write into those of weights."""
        return self._partial.content

    @property
    def layout(self) -> Layout:
        return self._layout

    def also_written(self, ranges: Ranges) -> None:
        """Rows that another process wrote into this checkpoint's files."""
        self._writer.also_written(ranges)

    def close(self) -> None:
        try:
            self._writer.check_complete()
            self._writer.sync()
            self._write_texts()
            self.check(self._partial.content)
        except OSError as error:
            self.abort()
            raise _failed(self.target, error) from error
        except BaseException:
            self.abort()
            raise
        self._writer.close()
        try:
            self.notes += self._partial.publish()
        except OSError as error:  # nothing is deleted: the next run finishes or undoes it
            self._partial.leave()
            raise _failed(self.target, error) from error

    def abort(self) -> None:
        self._writer.close()
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
            self._writer.create()
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
        manifest |= listing(content, present)
        (content / MANIFEST).write_text(
            json.dumps(manifest, indent=2, ensure_ascii=False) + "\n", encoding="utf-8"
        )
        for path in (*present, content / MANIFEST):
            sync(path)


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
    if error.errno == errno.EFBIG:
        return MergingError(
            f"no room to write {target}: {error.strerror}; unfinished files are removed",
            remedy=LARGER,
        )
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
