"""One expert and its head, made in a process of its own."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from merging.demo.publishing import published
from merging.demo.side_by_side import Job, run_side_by_side, step_counter
from merging.demo.vision.experts import train_expert
from merging.demo.vision.heads import head_of
from merging.demo.vision.tasks import Pictures


@dataclass(frozen=True, eq=False)
class Training:
    """One expert to be made, and its head unless that is there: each file appears when it is whole."""

    base: Path
    pictures: Pictures
    classes: int
    head: Path
    folder: Path
    steps: int
    seed: int

    def job(self, workshop: Path) -> Job:
        """What its process needs is written into `workshop`."""
        stored = workshop / f"{self.folder.name}.pictures"
        pictures = {
            "pixels": torch.from_numpy(self.pictures.pixels),
            "labels": torch.from_numpy(self.pictures.labels),
        }
        save_file(pictures, stored)
        given = (self.base, stored, self.head, self.folder, self.classes, self.steps, self.seed)
        return Job(f"the expert {self.folder.name}", __name__, tuple(map(str, given)), self.steps)


def train_side_by_side(trainings: Sequence[Training], report: Callable[[int, int], None]) -> None:
    """Raises MergingError with what a process said."""
    with tempfile.TemporaryDirectory() as workshop:
        run_side_by_side([training.job(Path(workshop)) for training in trainings], report)


def main() -> None:
    """One training, in the process made for it."""
    parser = argparse.ArgumentParser()
    for name in ("base", "pictures", "head", "folder"):
        parser.add_argument(name, type=Path)
    for name in ("classes", "steps", "seed"):
        parser.add_argument(name, type=int)
    given = parser.parse_args()
    stored = load_file(given.pictures)
    pictures = Pictures(stored["pixels"].numpy(), stored["labels"].numpy())
    report = step_counter()
    torch.set_num_threads(1)
    if not given.head.exists():
        with published(given.head) as making:
            save_file(head_of(given.base, pictures, given.classes), making)
    head = load_file(given.head)
    with published(given.folder) as making:
        train_expert(given.base, pictures, head, making, steps=given.steps, seed=given.seed, report=report)


if __name__ == "__main__":
    main()
