"""Emoji, icons and flags: what an icon shows, in the hand of artists whom training never saw."""

from __future__ import annotations

import random
import zlib
from collections import defaultdict
from collections.abc import Callable

from benchmarks.suites.vision8.artwork import WHITE, IconSets, concept_of, placed
from benchmarks.suites.vision8.splits import Drawn, Splits, split
from merging.demo.vision.drawing import two_colours

# fmt: off
CONCEPTS = (
    "bell", "book", "bookmark", "calendar", "camera", "clipboard", "clock", "cloud", "credit-card",
    "download", "eye", "filter", "flag", "folder", "globe", "heart", "home", "key", "keyboard", "link",
    "lock", "moon",
    "phone", "play", "search", "share", "shield", "star", "sun", "tag",
)
EMOJI_GROUPS = (
    "Activities", "Animals & Nature", "Food & Drink", "Objects", "People & Body", "Smileys & Emotion",
    "Symbols", "Travel & Places",
)
# fmt: on
EMOJI_SETS, EMOJI_UNSEEN = ("noto", "noto-v1", "openmoji", "fluent-emoji-flat"), "twemoji"
COUNTRIES, FLAG_DRAWINGS = 100, 3
_OTHER_THINGS = ("Emoji", "Logos", "Flags / Maps", "Programming")
_PER_CONCEPT, _PER_GROUP = 4, 220
_UNSEEN_IN = 5
"""One design family in so many is the test's."""
_REGIONAL_A = 0x1F1E6


def emoji(sets: IconSets, seed: int) -> Splits:
    """The Unicode group of an emoji; a whole artist (Twemoji) is unseen, the concepts are not."""
    known, unseen = Drawn(), Drawn()
    for name in (*EMOJI_SETS, EMOJI_UNSEEN):
        categories = sets.of(name)["categories"]
        for label, group in enumerate(EMOJI_GROUPS):
            icons = [
                one for one in sorted(categories.get(group, ())) if not ("skin-tone" in one or "woman" in one)
            ]
            random.Random(f"{seed}/{name}/{group}").shuffle(icons)
            for icon in icons[:_PER_GROUP]:
                _add(unseen if name == EMOJI_UNSEEN else known, sets, name, icon, label)
    return split("emoji", [group.replace(" & ", "-") for group in EMOJI_GROUPS], known, unseen, seed)


def icons(sets: IconSets, seed: int, report: Callable[[int, int], None]) -> Splits:
    """Which of thirty everyday things an icon shows; whole design families are unseen."""
    known, unseen = Drawn(), Drawn()
    names = [name for name in sorted(sets.about) if sets.about[name].get("category") not in _OTHER_THINGS]
    for done, name in enumerate(names):
        report(done, len(names))
        drawn: dict[str, int] = defaultdict(int)
        into = unseen if zlib.crc32(name.split("-")[0].encode()) % _UNSEEN_IN == 0 else known
        for icon in sorted(sets.of(name)["icons"]) if name in sets else ():
            concept = concept_of(icon)
            if concept in CONCEPTS and drawn[concept] < _PER_CONCEPT:
                drawn[concept] += 1
                ink, paper = two_colours(random.Random(f"{seed}/{name}/{icon}"))
                _add(into, sets, name, icon, CONCEPTS.index(concept), ink, paper)
    report(len(names), len(names))
    return split("icons", CONCEPTS, known, unseen, seed)


def flags(sets: IconSets, seed: int) -> Splits:
    """The country of a flag; two artists (OpenMoji and CoreUI) are unseen."""
    names = _flag_names(sets)
    codes = [
        code for code in sorted(names) if all(_has(sets, code, names[code], name) for name in _FLAG_NEEDED)
    ]
    chosen = sorted(sorted(codes, key=lambda code: zlib.crc32(code.encode()))[:COUNTRIES])
    known, unseen = Drawn(), Drawn()
    for name, style in _FLAGS:
        for label, code in enumerate(chosen):
            icon = style.format(code=code, name=names[code])
            for drawing in range(FLAG_DRAWINGS):
                into, other = (unseen if name in _FLAGS_UNSEEN else known), f"{style}/{drawing}"
                _add(into, sets, name, icon, label, other=other)
    return split("flags", chosen, known, unseen, seed)


_FLAGS = (
    ("flag", "{code}-4x3"), ("flag", "{code}-1x1"), ("flagpack", "{code}"), ("circle-flags", "{code}"),
    ("twemoji", "flag-{name}"), ("emojione", "flag-for-{name}"), ("openmoji", "flag-{name}"),
    ("cif", "{code}"),
)  # fmt: skip
_FLAGS_UNSEEN = ("openmoji", "cif")
_FLAG_NEEDED = ("flagpack", "twemoji", "openmoji", "cif")


def _flag_names(sets: IconSets) -> dict[str, str]:
    """A country's name in emoji sets by its ISO code: `de` is `germany`."""
    found = {}
    for points, icon in sets.of("openmoji")["chars"].items():
        letters = [int(point, 16) - _REGIONAL_A for point in points.split("-")]
        if len(letters) == 2 and all(0 <= letter < 26 for letter in letters) and icon.startswith("flag-"):
            found["".join(chr(ord("a") + letter) for letter in letters)] = icon.removeprefix("flag-")
    return found


def _has(sets: IconSets, code: str, name: str, among: str) -> bool:
    return any(style.format(code=code, name=name) in sets.of(s)["icons"] for s, style in _FLAGS if s == among)


def _add(
    into: Drawn,
    sets: IconSets,
    name: str,
    icon: str,
    label: int,
    ink: tuple[int, int, int] = (0, 0, 0),
    paper: tuple[int, int, int] = WHITE,
    other: str = "",
) -> None:
    artwork = sets.drawn(name, icon, ink)
    picture = artwork and placed(artwork, paper, random.Random(f"{name}/{icon}/{other}"))
    into.add(picture, label, f"{name}/{icon}")
