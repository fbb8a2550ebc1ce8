"""SolvedBlocks: what a sweep has solved so far, on disk, so that a run which was killed goes on with it."""

from __future__ import annotations

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
    other facts are replaced as the sweep reaches their block.
    """

    def __init__(self, folder: Path, facts: str) -> None:
        """`facts`: a fingerprint of everything that decides the tensors. Nothing is written before `keep`."""
        self._folder, self._facts = folder, facts
        self.count = 0
        while self._is_ours(self._path(self.count)):
            self.count += 1

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
        metadata = {"facts": self._facts, "notes": json.dumps(solved.notes)}
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            save_file({name: one.contiguous() for name, one in solved.tensors.items()}, scratch, metadata)
            sync(scratch)
            os.replace(scratch, place)
            sync(self._folder)
        except OSError as error:
            scratch.unlink(missing_ok=True)
            raise OutputError(f"{place} cannot be written: {error.strerror or error}") from error

    def _path(self, index: int) -> Path:
        return self._folder / f"block-{index:05}.safetensors"

    def _is_ours(self, path: Path) -> bool:
        return path.is_file() and _metadata(path).get("facts") == self._facts


def _metadata(path: Path) -> Mapping[str, str]:
    """Of a safetensors file; empty for what is none."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt") as file:
            return file.metadata() or {}
    except (SafetensorError, OSError):
        return {}
