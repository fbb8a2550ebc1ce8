"""Letters in fonts and writing systems in cuts that training never saw."""

from __future__ import annotations

import string
import unicodedata
import zlib
from collections.abc import Callable
from io import BytesIO

from fontTools.ttLib import TTFont

from benchmarks.suites.vision8.splits import Drawn, Splits, split
from merging.demo.packages import Archive
from merging.demo.vision.drawing import Glyph, draw, is_drawable, load_font
from merging.demo.vision.letters import is_held_out

# fmt: off
SCRIPTS = {
    "Arabic": (0x621, 0x64A), "Armenian": (0x561, 0x586), "Bengali": (0x985, 0x9B9),
    "Devanagari": (0x904, 0x939),
    "Ethiopic": (0x1200, 0x1357), "Georgian": (0x10D0, 0x10FA), "Gujarati": (0xA85, 0xAB9),
    "Gurmukhi": (0xA05, 0xA39),
    "Hebrew": (0x5D0, 0x5EA), "Kannada": (0xC85, 0xCB9), "Khmer": (0x1780, 0x17A2), "Lao": (0xE81, 0xEAE),
    "Malayalam": (0xD05, 0xD39), "Myanmar": (0x1000, 0x102A), "Sinhala": (0xD85, 0xDC6),
    "Tamil": (0xB85, 0xBB9),
    "Telugu": (0xC05, 0xC39), "Thai": (0xE01, 0xE2E),
}
# fmt: on
_FONT = "usr/share/fonts/truetype/noto/Noto{cut}{script}-{weight}.ttf"
_CUTS = {"Sans": True, "Serif": False}
"""Cuts, and whether training sees them."""
_UNSEEN_IN = 4
"""One character of a script in so many is the test's."""
_LETTER_DRAWINGS, _SEEN_DRAWINGS, _UNSEEN_DRAWINGS = 4, 3, 2


def letters(trdg: Archive, seed: int, report: Callable[[int, int], None]) -> Splits:
    """A to Z; whole font families are unseen."""
    known, unseen = Drawn(), Drawn()
    fonts = trdg.names("trdg/fonts/latin/*.[to]tf")
    for done, member in enumerate(fonts):
        report(done, len(fonts))
        font, held_out = load_font(trdg.read(member)), is_held_out(member)
        for label, letter in enumerate(string.ascii_uppercase):
            for variant in range(1 if held_out else _LETTER_DRAWINGS):
                glyph = Glyph(f"{member}/{letter}", font, letter)
                (unseen if held_out else known).add(draw(glyph, variant), label, glyph.name)
    report(len(fonts), len(fonts))
    return split("letters", tuple(string.ascii_uppercase), known, unseen, seed)


def scripts(noto: Archive, seed: int) -> Splits:
    """The writing system of a character; both the characters and the cut (Serif) are unseen."""
    known, unseen = Drawn(), Drawn()
    fonts = noto.matching("usr/share/fonts/truetype/noto/Noto*.ttf")
    held = [
        s for s in SCRIPTS if all(_FONT.format(cut=c, script=s, weight="Regular") in fonts for c in _CUTS)
    ]
    for label, script in enumerate(held):
        first, last = SCRIPTS[script]
        for cut, seen in _CUTS.items():
            for weight in ("Regular", "Bold"):
                data = fonts.get(_FONT.format(cut=cut, script=script, weight=weight))
                if data is None:
                    continue
                covered, font = TTFont(BytesIO(data), lazy=True).getBestCmap(), load_font(data)
                for point in range(first, last + 1):
                    is_known = zlib.crc32(str(point).encode()) % _UNSEEN_IN != 0
                    glyph = Glyph(f"{cut}/{weight}/{point:x}", font, chr(point))
                    usable = point in covered and unicodedata.category(chr(point)).startswith("L")
                    if is_known == seen and usable and is_drawable(glyph):
                        for variant in range(_SEEN_DRAWINGS if seen else _UNSEEN_DRAWINGS):
                            (known if seen else unseen).add(
                                draw(glyph, variant), label, f"{script}/{point:x}"
                            )
    return split("scripts", held, known, unseen, seed)
