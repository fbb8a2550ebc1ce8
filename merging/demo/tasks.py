"""What a demo task is: labelled pictures to learn from, and labelled pictures of a kind never seen in training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Pictures:
    """Pictures [examples, height, width, 3] of bytes, and the class index of each."""

    pixels: np.ndarray
    labels: np.ndarray

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, index: Sequence[int] | np.ndarray) -> Pictures:
        return Pictures(self.pixels[index], self.labels[index])

    def first_of_each_class(self, count: int) -> Pictures:
        """At most `count` pictures a class, in the order found."""
        chosen = [np.flatnonzero(self.labels == label)[:count] for label in np.unique(self.labels)]
        return self.take(np.sort(np.concatenate(chosen)))


@dataclass(frozen=True)
class Task:
    """A classification task; `classes` are sorted, as folders are when they are listed."""

    name: str
    classes: tuple[str, ...]
    train: Pictures
    test: Pictures
