"""Tasks: test pictures come from writers, font families and icon sets that training never sees."""

from __future__ import annotations

import json
import string
import zipfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageFont

from merging.demo.packages import Archive
from merging.demo.vision.digits import TEST_EXAMPLES, digits
from merging.demo.vision.icons import CONCEPTS, TEST_DRAWINGS, TRAIN_DRAWINGS, concept_of, icons
from merging.demo.vision.icons import is_held_out as is_held_out_set
from merging.demo.vision.letters import is_held_out as is_held_out_family
from merging.demo.vision.letters import letters
from merging.demo.vision.tasks import Pictures, write_pictures

FONT = ImageFont.load_default(10).font_bytes


def ignore(done: int, total: int) -> None:
    """Progress that no test looks at."""


def a_wheel(path: Path, members: dict[str, bytes]) -> Archive:
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return Archive(path)


def some_pictures(labels: list[int]) -> Pictures:
    pixels = np.zeros((len(labels), 2, 2, 3), dtype=np.uint8)
    pixels[:, 0, 0, 0] = np.arange(len(labels))
    return Pictures(pixels, np.array(labels))


def test_the_end_of_the_digits_is_held_out() -> None:
    task = digits()

    assert (len(task.train), len(task.test)) == (1797 - TEST_EXAMPLES, TEST_EXAMPLES)
    assert set(task.test.labels) == set(range(10))
    assert task.train.pixels.max() == 255


@pytest.mark.parametrize(
    ("font", "held_out"),
    [
        ("OpenSans-Bold", True),
        ("OpenSans-Italic", True),
        ("Pacifico", True),
        ("AmaticSC-Regular", True),
        ("Lato-Bold", False),
        ("RobotoCondensed-Light", False),
    ],
)
def test_a_font_family_is_held_out_whole(font: str, held_out: bool) -> None:
    assert is_held_out_family(f"trdg/fonts/latin/{font}.ttf") is held_out


def test_letters_of_held_out_fonts_are_for_the_test_only(tmp_path: Path) -> None:
    folder = "trdg/fonts/latin"
    wheel = a_wheel(
        tmp_path / "trdg.whl",
        {f"{folder}/Lato-Bold.ttf": FONT, f"{folder}/Pacifico.ttf": FONT, "trdg/fonts/cn/x.ttf": b""},
    )

    task = letters(wheel, ignore)

    assert task.classes == tuple(string.ascii_uppercase)
    assert list(task.train.labels) == list(task.test.labels) == list(range(26))
    assert not np.array_equal(task.train.pixels, task.test.pixels)


@pytest.mark.parametrize(
    ("icon", "concept"),
    [
        ("bell", "bell"),
        ("bell-outline", "bell"),
        ("bell-2-fill", "bell"),
        ("flag-variant-outline", "flag"),
        ("bell-slash", "bell-slash"),
        ("book-open-fill", "book-open"),
    ],
)
def test_styles_are_no_part_of_a_concept(icon: str, concept: str) -> None:
    assert concept_of(icon) == concept


def test_an_icon_set_is_held_out_whole() -> None:
    fonts = ["codicon-0.0.36", "elusiveicons-webfont-2.0", "remixicon-2.5.0", "phosphor-1.3.0"]

    assert [is_held_out_set(f"qtawesome/fonts/{font}.ttf") for font in fonts] == [True, True, True, False]


def test_every_concept_is_drawn_equally_often(tmp_path: Path) -> None:
    names = {f"{concept}-fill": hex(ord("A") + number) for number, concept in enumerate(CONCEPTS)}
    members = {"qtawesome/fonts/fontawesome5-brands-webfont-1.0.ttf": b"not read"}
    for font in ("phosphor", "codicon"):
        members[f"qtawesome/fonts/{font}-1.0.ttf"] = FONT
        members[f"qtawesome/fonts/{font}-charmap-1.0.json"] = json.dumps(names).encode()

    task = icons(a_wheel(tmp_path / "qtawesome.whl", members), ignore)

    assert list(task.classes) == sorted(task.classes)
    assert set(np.bincount(task.train.labels)) == {TRAIN_DRAWINGS}
    assert set(np.bincount(task.test.labels)) == {TEST_DRAWINGS}


def test_a_spread_is_balanced_and_reaches_to_the_end() -> None:
    pictures = some_pictures([0, 0, 0, 0, 0, 0, 1, 1, 1, 2])

    chosen = pictures.spread(3)

    assert list(chosen.labels) == [0, 0, 0, 1, 1, 1, 2]
    assert list(chosen.pixels[:, 0, 0, 0]) == [0, 2, 4, 6, 7, 8, 9]


def test_pictures_are_read_back_in_order_of_their_classes(tmp_path: Path) -> None:
    pictures = some_pictures([1, 0, 1])

    write_pictures(pictures, ("cat", "dog"), tmp_path)

    assert [path.name for path in sorted(tmp_path.iterdir())] == ["cat", "dog"]
    dogs = [np.asarray(Image.open(path)) for path in sorted((tmp_path / "dog").iterdir())]
    assert np.array_equal(dogs, pictures.pixels[[0, 2]])
