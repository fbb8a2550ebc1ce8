"""Glyphs of fonts as small coloured pictures, each drawn from a seed of its own."""

from __future__ import annotations

import random
from io import BytesIO
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageDraw, ImageFont

PIXELS = 56
"""Width and height of every picture: four patches of the ViT each way."""

_GLYPH_PIXELS = 96
_LEAST_CONTRAST = 90
_DEGREES = 12.0
_FILL = (0.6, 0.9)

Colour = tuple[int, int, int]


class Glyph(NamedTuple):
    """One character of one font; `name` tells them apart and seeds the drawing."""

    name: str
    font: ImageFont.FreeTypeFont
    character: str


def load_font(data: bytes) -> ImageFont.FreeTypeFont:
    """A font from the bytes of its file, large enough that every drawing shrinks it."""
    return ImageFont.truetype(BytesIO(data), _GLYPH_PIXELS)


def draw(glyph: Glyph, variant: int) -> np.ndarray:
    """The glyph in two random colours, a little turned, scaled and moved: [PIXELS, PIXELS, 3] bytes.

    The same name and variant give the same picture.
    """
    dice = random.Random(f"{glyph.name}/{variant}")
    ink, paper = two_colours(dice)
    shape = _outline(glyph).rotate(dice.uniform(-_DEGREES, _DEGREES), Image.Resampling.BICUBIC, expand=True)
    shape = shape.crop(shape.getbbox())
    scale = dice.uniform(*_FILL) * PIXELS / max(shape.size)
    shape = shape.resize((max(1, round(shape.width * scale)), max(1, round(shape.height * scale))))
    picture = Image.new("RGB", (PIXELS, PIXELS), paper)
    corner = (round(dice.random() * (PIXELS - shape.width)), round(dice.random() * (PIXELS - shape.height)))
    picture.paste(ink, (*corner, corner[0] + shape.width, corner[1] + shape.height), shape)
    return np.asarray(picture)


def is_drawable(glyph: Glyph) -> bool:
    """Whether the font has any ink for the character."""
    return _outline(glyph).getbbox() is not None


def _outline(glyph: Glyph) -> Image.Image:
    """The glyph's coverage on a canvas that holds it whole, wherever the font's origin lies."""
    left, top, right, bottom = glyph.font.getbbox(glyph.character)
    canvas = Image.new("L", (max(1, round(right - left)), max(1, round(bottom - top))))
    ImageDraw.Draw(canvas).text((-left, -top), glyph.character, fill=255, font=glyph.font)
    return canvas


def two_colours(dice: random.Random) -> tuple[Colour, Colour]:
    while True:
        ink, paper = (_colour(dice), _colour(dice))
        if abs(sum(ink) - sum(paper)) / 3 >= _LEAST_CONTRAST:
            return ink, paper


def _colour(dice: random.Random) -> Colour:
    return dice.randrange(256), dice.randrange(256), dice.randrange(256)
