"""Icons: everyday concepts in the icon fonts of the `qtawesome` package; whole icon sets are held out."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import PurePosixPath

import numpy as np

from merging.demo.packages import Archive
from merging.demo.vision.drawing import Glyph, draw, load_font
from merging.demo.vision.tasks import Pictures, Task

# fmt: off
CONCEPTS = (
    "bell", "book", "bookmark", "briefcase", "bug", "calendar", "camera", "car", "cloud", "compass",
    "database", "download", "eye", "flag", "folder", "gift", "heart", "key", "leaf",
    "lightbulb", "lock", "pencil", "phone", "rocket", "shield", "star",
)
# fmt: on

TEST_SETS = ("codicon", "elusiveicons", "remixicon")
"""Three designers' icon sets; training sees Font Awesome, Material Design Icons and Phosphor."""

TRAIN_DRAWINGS = 80
TEST_DRAWINGS = 16
"""How many pictures a concept has: its icons in turn, each time in other colours."""

_STYLES = re.compile(r"(-(outline|filled|fill|solid|bold|line|thin|light|duotone|variant|alt|\d+))+$")
_BRANDS = "brands"


def icons(qtawesome: Archive, report: Callable[[int, int], None]) -> Task:
    """Every concept drawn equally often, from all the icons that bear its name in any style."""
    train, test = [], []
    glyphs = _glyphs(qtawesome)
    for label, concept in enumerate(CONCEPTS):
        report(label, len(CONCEPTS))
        train += _drawings(glyphs[concept, False], label, TRAIN_DRAWINGS)
        test += _drawings(glyphs[concept, True], label, TEST_DRAWINGS)
    report(len(CONCEPTS), len(CONCEPTS))
    return Task("icons", CONCEPTS, Pictures.of(train), Pictures.of(test))


def concept_of(icon: str) -> str:
    """What an icon shows, without the style in its name: `bell-outline` and `bell-2-fill` are both `bell`."""
    return _STYLES.sub("", icon)


def is_held_out(font: str) -> bool:
    """Whether a font file belongs to the sets that only the test may show."""
    return PurePosixPath(font).name.startswith(TEST_SETS)


def _glyphs(qtawesome: Archive) -> dict[tuple[str, bool], list[Glyph]]:
    """Glyphs by concept, and by whether they are held out; a glyph with two names is listed once."""
    found: dict[tuple[str, bool], list[Glyph]] = {
        (concept, held_out): [] for concept in CONCEPTS for held_out in (False, True)
    }
    for member in qtawesome.names("qtawesome/fonts/*.ttf"):
        if _BRANDS in member:
            continue
        font = load_font(qtawesome.read(member))
        names = json.loads(qtawesome.read(_charmap(member)))
        seen = set()
        for icon, code in sorted(names.items()):
            key = concept_of(icon), is_held_out(member)
            if key in found and code not in seen:
                seen.add(code)
                found[key].append(Glyph(f"{member}/{icon}", font, chr(int(code, 16))))
    return found


def _charmap(font: str) -> str:
    """`phosphor-1.3.0.ttf` is described by `phosphor-charmap-1.3.0.json`."""
    return re.sub(r"-([\d.]+)\.ttf$", r"-charmap-\1.json", font)


def _drawings(glyphs: list[Glyph], label: int, count: int) -> list[tuple[np.ndarray, int]]:
    return [(draw(glyphs[n % len(glyphs)], n // len(glyphs)), label) for n in range(count)]
