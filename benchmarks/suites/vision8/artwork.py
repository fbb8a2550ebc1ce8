"""Vector and pixel artwork as small pictures, each from a seed of its own; icon sets of `@iconify/json`."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Mapping
from functools import cache
from io import BytesIO
from typing import Any

import numpy as np
import resvg_py
from PIL import Image

from merging.demo.packages import Archive
from merging.demo.vision.drawing import PIXELS

WHITE = (255, 255, 255)
_RENDERED = 128
_SETS = "package/json/{name}.json"
_STYLE = re.compile(r"(-(outlined?|filled|fill|solid|bold|linear|line|thin|light|duotone|broken|rounded?|"
                    r"sharp|two-?tone|regular|\d+|o|alt|bulk|off))+$")  # fmt: skip
_PREFIX = re.compile(r"^(i|icon|ic|fa|bx|bxs|baseline|outline|sharp|round|twotone)-")


class IconSets:
    """Icon sets by name, read from the package when they are asked for."""

    def __init__(self, package: Archive) -> None:
        self._texts = package.matching("package/json/*.json")
        self.about: Mapping[str, Any] = json.loads(package.read("package/collections.json"))
        self._opened: dict[str, Mapping[str, Any]] = {}

    def __contains__(self, name: str) -> bool:
        return _SETS.format(name=name) in self._texts

    def of(self, name: str) -> Mapping[str, Any]:
        """A set's own JSON: icons, categories, chars."""
        if name not in self._opened:
            self._opened[name] = json.loads(self._texts[_SETS.format(name=name)])
        return self._opened[name]

    def drawn(self, name: str, icon: str, ink: tuple[int, int, int] = (0, 0, 0)) -> Image.Image | None:
        """An icon in colours with its transparency; None where the set lacks it or it cannot be drawn."""
        given = self.of(name)
        if icon not in given["icons"]:
            return None
        box = {**given, **given["icons"][icon]}
        left, top = box.get("left", 0), box.get("top", 0)
        width, height = box.get("width", 16), box.get("height", 16)
        body = box["body"].replace("currentColor", "#{:02x}{:02x}{:02x}".format(*ink))
        scale = _RENDERED / max(width, height)
        svg = (
            '<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" '
            f'width="{scale * width:.0f}" height="{scale * height:.0f}" '
            f'viewBox="{left} {top} {width} {height}">{body}</svg>'
        )
        try:
            png = bytes(resvg_py.svg_to_bytes(svg_string=svg))
        except ValueError:  # what resvg says of artwork it cannot parse
            return None
        return Image.open(BytesIO(png)).convert("RGBA")


@cache
def concept_of(icon: str) -> str:
    """What an icon shows, without the style in its name: `outline-bell` and `bell-2-fill` are both `bell`."""
    return _STYLE.sub("", _PREFIX.sub("", icon))


def placed(
    artwork: Image.Image, paper: tuple[int, int, int], dice: random.Random, degrees: float = 8.0
) -> np.ndarray | None:
    """A little turned, scaled and moved on paper: [PIXELS, PIXELS, 3] bytes; None for empty artwork."""
    box = artwork.getbbox()
    if box is None:
        return None
    shape = Image.new("RGB", artwork.size, paper)
    shape.paste(artwork, mask=artwork.getchannel("A"))
    shape = shape.crop(box).rotate(
        dice.uniform(-degrees, degrees), Image.Resampling.BICUBIC, expand=True, fillcolor=paper
    )
    scale = dice.uniform(0.75, 0.98) * PIXELS / max(shape.size)
    size = (max(1, round(shape.width * scale)), max(1, round(shape.height * scale)))
    shape = shape.resize(size, Image.Resampling.LANCZOS)
    picture = Image.new("RGB", (PIXELS, PIXELS), paper)
    picture.paste(shape, (dice.randint(0, PIXELS - size[0]), dice.randint(0, PIXELS - size[1])))
    return np.asarray(picture)
