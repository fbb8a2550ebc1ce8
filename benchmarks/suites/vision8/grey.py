"""MNIST and Fashion-MNIST: files in the idx format, each pixel doubled to both sides."""

from __future__ import annotations

import gzip
import struct

import numpy as np

from benchmarks.suites.vision8.splits import Drawn, Splits, split
from merging.demo.packages import Archive
from merging.demo.vision.drawing import PIXELS

GARMENTS = ("tshirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "boot")
_KNOWN, _UNSEEN = 9000, 2000
"""How many are enlarged, of the files' 60 000 and 10 000."""


def mnist(package: Archive, seed: int) -> Splits:
    """Handwritten digits; the test's writers are others than those of the training file."""
    return _task("mnist", tuple("0123456789"), package, "package/data/{part}-{kind}-ubyte", seed)


def fashion(package: Archive, seed: int) -> Splits:
    """Photographs of garments, split as their authors did."""
    pattern = "usr/share/datasets/fashion-mnist/{part}-{kind}-ubyte.gz"
    return _task("fashion", GARMENTS, package, pattern, seed)


def _task(name: str, classes: tuple[str, ...], package: Archive, pattern: str, seed: int) -> Splits:
    def drawn(part: str, count: int) -> Drawn:
        pixels, labels = (
            _idx(package.read(pattern.format(part=part, kind=kind)))
            for kind in ("images-idx3", "labels-idx1")
        )
        chosen = np.sort(np.random.default_rng(seed).permutation(len(labels))[:count])
        ranks = np.argsort(np.argsort(classes))
        found = Drawn()
        for number in chosen:
            found.add(_enlarged(pixels[number]), ranks[labels[number]], f"{number}")
        return found

    return split(name, sorted(classes), drawn("train", _KNOWN), drawn("t10k", _UNSEEN), seed)


def _idx(data: bytes) -> np.ndarray:
    plain = gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data
    dimensions = plain[3]
    shape = struct.unpack(f">{dimensions}I", plain[4 : 4 + 4 * dimensions])
    return np.frombuffer(plain, np.uint8, offset=4 + 4 * dimensions).reshape(shape)


def _enlarged(grey_HW: np.ndarray) -> np.ndarray:
    times = PIXELS // len(grey_HW)
    return np.repeat(grey_HW.repeat(times, axis=0).repeat(times, axis=1)[..., None], 3, axis=2)
