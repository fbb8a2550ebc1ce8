"""The product as a contender: a spec on disk, the command that runs it, a first run and one that remembers.

The product keeps hashes of files and what it learned of checkpoints under $MERGING_CACHE. A first run starts
without any of that; the next finds what the one before it left, and makes its output anew all the same."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.measure import Contender

FIRST, AGAIN = "merging, first run", "merging, again"


@dataclass(frozen=True)
class Product:
    """One spec in a folder of its own."""

    folder: Path

    @classmethod
    def of(cls, folder: Path, spec: Mapping[str, Any]) -> Product:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        whole = {**spec, "output": {**spec.get("output", {}), "path": str(folder / "out")}}
        (folder / "spec.json").write_text(json.dumps(whole, indent=2), encoding="utf-8")
        return cls(folder)

    @property
    def spec(self) -> Path:
        return self.folder / "spec.json"

    @property
    def out(self) -> Path:
        return self.folder / "out"

    @property
    def merged(self) -> Path:
        return self.out / "merged"

    def command(self, launcher: Sequence[str] = ("-m", "merging")) -> tuple[str, ...]:
        return (sys.executable, *launcher, "pipeline", "run", str(self.spec), "--quiet")

    def first(self, label: str = FIRST) -> Contender:
        return self._contender(label, (self.out, self._cache))

    def again(self, label: str = AGAIN) -> Contender:
        return self._contender(label, (self.out,))

    def runs(self, *, once: bool) -> list[Contender]:
        """A first run, and one that remembers it, unless there is time for `once` only."""
        return [self.first()] if once else [self.first(), self.again()]

    def launched(self, label: str, launcher: Sequence[str], *, threads: int) -> Contender:
        """A first run through another launcher than `python -m merging`, with so many threads a process."""
        found = self._contender(label, (self.out, self._cache), self.command(launcher))
        return replace(found, environment={**self.environment, "OMP_NUM_THREADS": str(threads)})

    @property
    def environment(self) -> dict[str, str]:
        return {"MERGING_CACHE": str(self._cache), "HF_HUB_OFFLINE": "1"}

    def _contender(
        self, label: str, fresh: tuple[Path, ...], command: tuple[str, ...] | None = None
    ) -> Contender:
        return Contender(
            label,
            command or self.command(),
            environment=self.environment,
            fresh=fresh,
            report=self.out / "report.json",
        )

    @property
    def _cache(self) -> Path:
        return self.folder / "cache"


def tensor_tasks(
    files: Mapping[str, Path], *, examples: int, batch_size: int | None = None
) -> dict[str, Any]:
    """The spec's "tasks": the first examples of a file of model inputs each."""
    size = {} if batch_size is None else {"batch_size": batch_size}
    return {
        task: {"calibration": {"type": "tensors", "path": str(file), "examples": examples, **size}}
        for task, file in files.items()
    }
