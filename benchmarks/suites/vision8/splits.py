"""A task's pictures, apart: for training, calibration, validation and test, no picture in two of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from merging.demo.vision.tasks import Pictures

TRAIN, CALIBRATION, VALIDATION, TEST = 6000, 512, 256, 500
"""How many pictures each part has at most."""


@dataclass(frozen=True)
class Splits:
    """`classes` are sorted, as their folders will be when they are listed."""

    name: str
    classes: tuple[str, ...]
    train: Pictures
    calibration: Pictures
    validation: Pictures
    test: Pictures


class Drawn:
    """Pictures as they are drawn, each with its class and its subject: a drawing, a glyph, a photograph."""

    def __init__(self) -> None:
        self._pixels: list[np.ndarray] = []
        self._labels: list[int] = []
        self._subjects: list[str] = []

    def add(self, pixels: np.ndarray | None, label: int, subject: str) -> None:
        """None, of what could not be drawn, adds nothing."""
        if pixels is not None:
            self._pixels.append(pixels)
            self._labels.append(label)
            self._subjects.append(subject)

    @property
    def pictures(self) -> Pictures:
        return Pictures(np.stack(self._pixels), np.array(self._labels))

    @property
    def subjects(self) -> list[str]:
        return self._subjects


def split(name: str, classes: Sequence[str], known: Drawn, unseen: Drawn, seed: int) -> Splits:
    """Train, calibration and validation from the `known`, the test from the `unseen` pictures.

    All pictures of one subject go into one part. Pictures that are there twice count once, where they come
    first: what `known` has of `unseen` is not tested. Raises ValueError for too few pictures.
    """
    dice = np.random.default_rng([seed, *name.encode()])
    seen: set[bytes] = set()
    ours, theirs = known.pictures, unseen.pictures
    first, test = _new(ours, seen), _new(theirs, seen)
    subjects = np.array(known.subjects)[first]
    names = np.unique(subjects)
    # A random rank for each subject: its pictures stand together, whatever the order they came in.
    rank = dict(zip(names, dice.permutation(len(names)), strict=True))
    first = first[np.argsort([rank[subject] for subject in subjects], kind="stable")]
    order = np.array([rank[subject] for subject in np.array(known.subjects)[first]])
    held = [_end(order, CALIBRATION), _end(order, CALIBRATION + VALIDATION)]
    if len(first) < 2 * held[1]:
        raise ValueError(f"{name}: {len(first)} pictures are too few to split")
    calibration, validation, train = np.split(first, held)
    parts = (
        _part(ours, _some(train, TRAIN, dice)),
        _part(ours, calibration[:CALIBRATION]),
        _part(ours, validation[:VALIDATION]),
        _part(theirs, _some(test, TEST, dice)),
    )
    return Splits(name, tuple(classes), *parts)


def _end(order: np.ndarray, count: int) -> int:
    """Where the subject ends that the `count`th picture shows."""
    return int(np.searchsorted(order, order[min(count, len(order)) - 1], side="right"))


def _some(index: np.ndarray, count: int, dice: np.random.Generator) -> np.ndarray:
    return np.sort(dice.permutation(index)[:count])


def _new(pictures: Pictures, seen: set[bytes]) -> np.ndarray:
    """Which pictures were not seen before; afterwards they are."""
    new = []
    for number, pixels in enumerate(pictures.pixels):
        if (content := pixels.tobytes()) not in seen:
            seen.add(content)
            new.append(number)
    return np.array(new, dtype=np.int64)


def _part(pictures: Pictures, index: np.ndarray) -> Pictures:
    return Pictures(pictures.pixels[index], pictures.labels[index])
