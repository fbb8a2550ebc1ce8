"""Letters: A to Z in the Latin fonts of the `trdg` package; whole font families are held out."""

from __future__ import annotations

import string
from collections.abc import Callable
from pathlib import PurePosixPath

import numpy as np

from merging.demo.packages import Archive
from merging.demo.vision.drawing import Glyph, draw, load_font
from merging.demo.vision.tasks import Pictures, Task

TEST_FAMILIES = ("Amatic", "OpenSans", "Pacifico", "Sansation")
"""Nineteen fonts: hand-drawn, humanist, brush script and geometric, none of them seen in training."""


def letters(trdg: Archive, report: Callable[[int, int], None]) -> Task:
    """Every letter once in every font."""
    fonts = trdg.names("trdg/fonts/latin/*.[to]tf")
    drawn: dict[bool, list[tuple[np.ndarray, int]]] = {False: [], True: []}
    for done, member in enumerate(fonts):
        report(done, len(fonts))
        font = load_font(trdg.read(member))
        for label, letter in enumerate(string.ascii_uppercase):
            glyph = Glyph(f"{member}/{letter}", font, letter)
            drawn[is_held_out(member)].append((draw(glyph, 0), label))
    report(len(fonts), len(fonts))
    return Task("letters", tuple(string.ascii_uppercase), Pictures.of(drawn[False]), Pictures.of(drawn[True]))


def is_held_out(font: str) -> bool:
    """Whether a font file belongs to the families that only the test may show."""
    return PurePosixPath(font).name.startswith(TEST_FAMILIES)
