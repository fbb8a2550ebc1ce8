"""Glyphs are drawn the same way each time, whole and visible."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import ImageFont

from merging.demo.vision.drawing import PIXELS, Glyph, draw

FONT = ImageFont.load_default(96)


def test_the_same_name_gives_the_same_picture() -> None:
    first = draw(Glyph("font/A", FONT, "A"), variant=3)
    again = draw(Glyph("font/A", FONT, "A"), variant=3)

    assert first.shape == (PIXELS, PIXELS, 3)
    assert np.array_equal(first, again)


def test_another_variant_or_name_gives_another_picture() -> None:
    picture = draw(Glyph("font/A", FONT, "A"), variant=0)

    assert not np.array_equal(picture, draw(Glyph("font/A", FONT, "A"), variant=1))
    assert not np.array_equal(picture, draw(Glyph("other/A", FONT, "A"), variant=0))


@pytest.mark.parametrize("character", ["A", "I", "Q", "j", "."])
def test_ink_stands_out_from_paper(character: str) -> None:
    brightness = draw(Glyph(f"font/{character}", FONT, character), variant=0).astype(float).mean(axis=2)

    assert brightness.max() - brightness.min() > 60


def test_drawing_does_not_touch_the_global_dice() -> None:
    import random

    random.seed(0)
    expected = random.random()
    random.seed(0)

    draw(Glyph("font/A", FONT, "A"), variant=0)

    assert random.random() == expected
