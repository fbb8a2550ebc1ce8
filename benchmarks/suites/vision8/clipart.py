"""Clip art by subject, out of Debian's openclipart; files of one name and other numbers stay together."""

from __future__ import annotations

import math
import random
import re
import struct
import zlib
from collections.abc import Callable
from io import BytesIO
from pathlib import PurePosixPath

from PIL import Image

from benchmarks.suites.vision8.artwork import WHITE, placed
from benchmarks.suites.vision8.splits import Drawn, Splits, split
from merging.demo.packages import Archive

SUBJECTS = ("animals", "buildings", "food", "people", "plants", "transportation")
_FOLDER = "usr/share/openclipart/png/{subject}/*.png"
_LARGEST, _THUMBNAIL, _UNSEEN_IN, _DRAWINGS = 3_000_000, 128, 4, 3


def clipart(package: Archive, seed: int, report: Callable[[int, int], None]) -> Splits:
    """The subject of a drawing; unseen are other files."""
    known, unseen = Drawn(), Drawn()
    for label, subject in enumerate(SUBJECTS):
        report(label, len(SUBJECTS))
        for member, data in package.matching(_FOLDER.format(subject=subject)).items():
            if math.prod(struct.unpack(">2I", data[16:24])) > _LARGEST:  # width and height in a PNG's header
                continue
            artwork = Image.open(BytesIO(data)).convert("RGBA")
            artwork.thumbnail((_THUMBNAIL, _THUMBNAIL))
            series = re.sub(r"\d+", "", PurePosixPath(member).stem)
            is_unseen = zlib.crc32(series.encode()) % _UNSEEN_IN == 0
            for drawing in range(1 if is_unseen else _DRAWINGS):
                picture = placed(artwork, WHITE, random.Random(f"{member}/{drawing}"))
                (unseen if is_unseen else known).add(picture, label, series)
    report(len(SUBJECTS), len(SUBJECTS))
    return split("clipart", SUBJECTS, known, unseen, seed)
