"""What a demo task is: labelled pictures to learn from, and others, of a kind never seen in training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image


@dataclass(frozen=True)
class Pictures:
    """Pictures [examples, height, width, 3] of bytes, and the class index of each."""

    pixels: np.ndarray
    labels: np.ndarray

    @classmethod
    def of(cls, drawn: Sequence[tuple[np.ndarray, int]]) -> Pictures:
        """From pairs of a picture and its class."""
        return cls(np.stack([pixels for pixels, _ in drawn]), np.array([label for _, label in drawn]))

    def __len__(self) -> int:
        return len(self.labels)

    def spread(self, per_class: int) -> Pictures:
        """At most `per_class` pictures of each class, evenly spaced over the order they come in."""
        chosen = []
        for label in np.unique(self.labels):
            found = np.flatnonzero(self.labels == label)
            count = min(per_class, len(found))
            chosen.append(found[np.arange(count) * len(found) // count])
        index = np.concatenate(chosen)
        return Pictures(self.pixels[index], self.labels[index])


@dataclass(frozen=True)
class Task:
    """A classification task; `classes` are sorted, as their folders will be when they are listed."""

    name: str
    classes: tuple[str, ...]
    train: Pictures
    test: Pictures

    def calibration(self, examples: int) -> Pictures:
        """Training pictures, equally many of each class: `examples` in all, or the few more it takes."""
        return self.train.spread(-(-examples // len(self.classes)))


def write_pictures(pictures: Pictures, classes: Sequence[str], folder: Path) -> None:
    """One folder of PNG files for each class."""
    for name in classes:
        (folder / name).mkdir(parents=True)
    for number, (pixels, label) in enumerate(zip(pictures.pixels, pictures.labels, strict=True)):
        Image.fromarray(pixels).save(folder / classes[label] / f"{number:04d}.png")
