"""SolvedBlocks: what a sweep has solved so far, on disk, so that a run which was killed goes on with it."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from merging.checkpoints.atomic import sync
from merging.errors import OutputError


class Solved(NamedTuple):
    """One block: its new tensors by their name in the module, and what is to be said of it in the report."""

    tensors: dict[str, Tensor]
    notes: dict[str, Any]


class SolvedBlocks:
    """One file a block, there whole or not at all, each with the facts that decide what is in it.

    `count` blocks can be read; they are the first ones, with no gap, all made from these `facts`. Files of
    other facts are replaced as the sweep reaches their block, and so is a file that was `spoilt`, the first
    of them: cut, or with other bytes than were written.
    """

    def __init__(self, folder: Path, facts: str) -> None:
        """`facts`: a fingerprint of everything that decides the tensors. Reads every block that it counts, to
        compare it with its digest. Nothing is written before `keep`."""
        self._folder, self._facts = folder, facts
        self.count = 0
        while (whole := self._is_whole(self._path(self.count))) is True:
            self.count += 1
        self.spoilt: Path | None = self._path(self.count) if whole is False else None

    @property
    def place(self) -> tuple[Path, str]:
        """From which another process makes the same."""
        return self._folder, self._facts

    def read(self, index: int) -> Solved:
        from safetensors import safe_open

        with safe_open(self._path(index), "pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            return Solved(tensors, json.loads(file.metadata()["notes"]))

    def keep(self, index: int, solved: Solved) -> None:
        """Write a block, wait until it is on the disk, and show it under its name."""
        from safetensors.torch import save_file

        place = self._path(index)
        scratch = place.with_suffix(".tmp")
        notes = json.dumps(solved.notes)
        metadata = {"facts": self._facts, "notes": notes, "sha256": _digest(solved.tensors, notes)}
        try:
            if self._folder.is_symlink() or self._folder.is_file():
                self._folder.unlink()
            self._folder.mkdir(parents=True, exist_ok=True)
            scratch.unlink(missing_ok=True)  # nothing is written through a link
            save_file({name: one.contiguous() for name, one in solved.tensors.items()}, scratch, metadata)
            sync(scratch)
            os.replace(scratch, place)
            sync(self._folder)
        except OSError as error:
            if scratch.is_file():
                scratch.unlink()
            raise OutputError(f"{place} cannot be written: {error.strerror or error}") from error

    def _path(self, index: int) -> Path:
        return self._folder / f"block-{index:05}.safetensors"

    def _is_whole(self, path: Path) -> bool | None:
        """Whether what lies there is what was written, by its digest; None if it is of other facts, or
        nothing."""
        from safetensors import SafetensorError, safe_open

        if self._folder.is_symlink() or not os.path.lexists(path):
            return None
        if path.is_symlink() or not path.is_file():
            return False
        try:
            with safe_open(path, "pt") as file:
                about = file.metadata() or {}
                if about.get("facts", self._facts) != self._facts:
                    return None
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (SafetensorError, OSError):
            return False
        return about.get("sha256") == _digest(tensors, about.get("notes", ""))


def _digest(tensors: Mapping[str, Tensor], notes: str) -> str:
    """SHA-256 of a block's tensors, by name, and of what is said of it."""
    import torch

    digest = hashlib.sha256(notes.encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"\n{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
