"""Which inputs of a run an output folder would lie among: what is written there could be taken for them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from merging.spec.paths import exists

WRITTEN = ("merged", "calibrated", "heads")  # folders of a run in its output folder


def clashes(
    output: Path, base: Any, experts: Mapping[str, Any], merge: Any, tasks: Mapping[str, Any]
) -> list[str]:
    """What is wrong with that output folder, a sentence each; none for one that holds the inputs beside what
    a run writes. Arguments as in a PipelineSpec, or None for what could not be read.

    Links are followed. Data in a file, and models that are one, may lie in a folder of anything.
    """
    real = Path(os.path.realpath(output))
    found = []
    for label, path in _inputs(base, experts, merge, tasks):
        if not exists(path):
            continue
        inside = Path(os.path.realpath(path))
        if path.is_dir() and real.is_relative_to(inside):
            found.append(f"is the folder of {label}, or inside it")
        elif any(inside.is_relative_to(real / name) for name in WRITTEN):
            name = inside.relative_to(real).parts[0]
            found.append(f'holds {label} in "{name}", where the run writes')
    return found


def _inputs(
    base: Any, experts: Mapping[str, Any], merge: Any, tasks: Mapping[str, Any]
) -> Iterator[tuple[str, Path]]:
    """Each of them by its name in a sentence; models of the hub lie elsewhere."""
    models = {"the base": base}
    models |= {f'expert "{name}"': one.ref for name, one in experts.items() if one is not None}
    for label, ref in models.items():
        if ref is not None and ref.is_local:
            yield label, Path(ref.model)
    if merge is not None and merge.type == "checkpoint":
        yield from _local("the merged model", merge.settings.model)
    for name, task in tasks.items():
        if task is None:
            continue
        for part in ("calibration", "validation", "test", "head"):
            source = getattr(task, part)
            yield from _local(f'the {part} data of task "{name}"', getattr(source, "path", None))
            yield from _local(f'the text tower of task "{name}"', getattr(source, "model", None))


def _local(label: str, path: Any) -> Iterator[tuple[str, Path]]:
    if path is not None and Path(path).is_absolute():
        yield label.replace("the head data", "the head"), Path(path)
