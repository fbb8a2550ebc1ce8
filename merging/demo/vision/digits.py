"""Digits: handwriting from scikit-learn's `load_digits`; the end of the file is held out."""

from __future__ import annotations

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits

from merging.demo.vision.drawing import PIXELS
from merging.demo.vision.tasks import Pictures, Task

TEST_EXAMPLES = 500
"""The last of the file, not drawn at random: digits that lie close together in it may be of one writer."""


def digits() -> Task:
    """1 797 digits of 8 x 8 pixels and 17 grey levels, enlarged."""
    source = load_digits()
    pixels = np.stack([_enlarge(image) for image in source.images])
    labels = source.target.astype(np.int64)
    return Task(
        name="digits",
        classes=tuple("0123456789"),
        train=Pictures(pixels[:-TEST_EXAMPLES], labels[:-TEST_EXAMPLES]),
        test=Pictures(pixels[-TEST_EXAMPLES:], labels[-TEST_EXAMPLES:]),
    )


def _enlarge(image: np.ndarray) -> np.ndarray:
    grey = Image.fromarray((image * (255 / 16)).round().astype(np.uint8))
    return np.asarray(grey.resize((PIXELS, PIXELS), Image.Resampling.BICUBIC).convert("RGB"))
