"""Pictures of unusual kinds: 16 bits, turned by EXIF, and files of a class folder that are not read."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from transformers import CLIPImageProcessor

from merging.data.images import ImageExamples, decoded
from merging.errors import DataError

DEEP = np.array([[0, 128, 129, 257, 25700, 65535]], dtype=np.uint16)
SHALLOW = [0, 0, 1, 1, 100, 255]


def stored(pixels: Any, kind: str) -> io.BytesIO:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, kind)
    file.seek(0)
    return file


def pictures(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (20, 24), (9, 90, len(name))).save(folder / name)
    return folder


def opened(folder: Path) -> ImageExamples:
    processor = CLIPImageProcessor(size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16})
    return ImageExamples(folder, where="test data", task="x", processor=processor, seed=0)


@pytest.mark.parametrize(
    "file",
    [
        stored(DEEP, "PNG"),
        stored(DEEP, "TIFF"),
        stored(DEEP.astype(">u2"), "TIFF"),
        io.BytesIO(b"P5 6 1 65535\n" + DEEP.astype(">u2").tobytes()),
    ],
    ids=["png", "tiff", "big-endian tiff", "pgm"],
)
def test_grey_of_16_bits_is_scaled(file: io.BytesIO) -> None:
    image = decoded(file)

    assert image.mode == "RGB"
    assert np.asarray(image)[0].tolist() == [[grey] * 3 for grey in SHALLOW]


@pytest.mark.parametrize(
    ("pixels", "words"),
    [(DEEP.astype(np.float32), "floating-point grey"), (DEEP.astype(np.int32), "signed or 32-bit whole")],
)
def test_grey_of_no_known_range_is_refused_by_name(pixels: Any, words: str) -> None:
    with pytest.raises(DataError, match=f"{words}.* expected 8 bits"):
        decoded(stored(pixels, "TIFF"))


def test_a_16_bit_picture_that_is_cut_off_is_no_whole_image() -> None:
    noise = np.random.default_rng(0).integers(0, 2**16, (60, 60), dtype=np.uint16)
    whole = stored(noise, "PNG").getvalue()

    with pytest.raises(DataError, match="not a whole image"):
        decoded(io.BytesIO(whole[: len(whole) // 2]))


def test_turned_pictures_are_told_and_taken_as_they_are(tmp_path: Path) -> None:
    folder = pictures(tmp_path / "data", "a/0.jpg", "a/1.jpg", "b/0.png")
    exif = Image.Exif()
    exif[0x0112] = 6
    with Image.open(folder / "a" / "1.jpg") as image:
        image.save(folder / "a" / "1.jpg", exif=exif)

    examples = opened(folder)

    assert decoded(folder / "a" / "1.jpg").size == (20, 24)
    (note,) = examples.notes
    assert "1 of 3 images say in EXIF" in note
    assert str(folder / "a" / "1.jpg") in note


def test_damaged_exif_says_nothing(tmp_path: Path) -> None:
    folder = pictures(tmp_path / "data", "a/0.jpg", "b/0.png")
    Image.new("RGB", (20, 24)).save(folder / "a" / "1.jpg", exif=b"Exif\x00\x00II*\x00\xff\xff")

    assert opened(folder).notes == ()


def test_files_that_are_not_read_are_counted(tmp_path: Path) -> None:
    folder = pictures(
        tmp_path / "data", "a/0.png", "a/1.gif", "b/0.png", "b/1.gif", "b/more/0.png", "loose.png", ".x/0.gif"
    )
    (folder / "a" / "about.TXT").write_text("")
    (folder / "a" / ".hidden.txt").write_text("")

    examples = opened(folder)

    assert len(examples) == 2
    (note,) = examples.notes
    assert "3 files of class folders that end otherwise (2 .gif, 1 .txt)" in note
    assert "1 images in folders inside class folders" in note
    assert "1 images outside of class folders" in note


def test_tiff_is_read(tmp_path: Path) -> None:
    examples = opened(pictures(tmp_path / "data", "a/0.tif", "b/0.TIFF"))

    assert (len(examples), examples.notes) == (2, ())
