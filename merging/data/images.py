"""ImageExamples: a folder per class, seen through the base's own image processor.

Shape letters: B examples.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import torch
from PIL import ExifTags, Image
from torch import Tensor

from merging.checkpoints.folder import open_clip_config
from merging.contracts.backbone import Batch
from merging.data.batching import LazyBatches
from merging.data.draw import drawn_order
from merging.data.hashing import example_hashes, fingerprint
from merging.data.numbering import renumbered
from merging.data.task import Examples
from merging.errors import DataError, Problem
from merging.libraries import reading_with

SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".webp", ".bmp", ".tif", ".tiff"})
CACHE_BYTES = 512 * 2**20
"""Processed pixels of one split are kept in memory up to this size; beyond it each batch is decoded anew."""

_SCALING = ("image_mean", "image_std", "rescale_factor")  # by which pixels are divided and shifted
_SOUND = "Copy the file from the model that the base was made from."


class Listing(NamedTuple):
    """Names of the classes, none where they are not known; pictures of each, paths or things that have
    `decoded`; notes; whether the names are those that were met, sorted."""

    classes: tuple[str, ...]
    pictures: Sequence[Sequence[Any]]
    notes: tuple[str, ...]
    found: bool = False


class ImageExamples(Examples):
    """Images in a fixed order: round by round one of each class, classes and images in a seeded order.

    So the first n are balanced as far as the folders allow, and a smaller n is the beginning of a larger.
    A label is the position of the class's folder among the sorted folder names, until `renumber_`.
    """

    def __init__(
        self,
        source: Path | Listing,
        *,
        where: str,
        task: str,
        processor: Any,
        seed: int,
        asked: int | None = None,
        skip: int = 0,
        batch_size: int = 16,
        cache_bytes: int = CACHE_BYTES,
    ) -> None:
        """`where` starts every message; `processor`: see `image_processor`. Opening decodes all images.
        `skip`: so many of the order are passed over."""
        self._cache_bytes = cache_bytes
        self.asked, self._where, self._processor, self.batch_size = asked, where, processor, batch_size
        listing = source if isinstance(source, Listing) else _listed(source, where)
        self.classes, files_of_class, self.notes, self.found_classes = listing
        drawn = drawn_order([len(files) for files in files_of_class], seed, task)[skip:][:asked]
        self.files = tuple(files_of_class[label][index] for label, index in drawn)
        self._labels = torch.tensor([label for label, _ in drawn]) if self.classes else None
        self._pixels: list[Tensor] | None = []
        self._hashes = self._scan()
        self._fingerprint = fingerprint(self._hashes, self._labels)

    def __len__(self) -> int:
        return len(self.files)

    def batches(self) -> Sequence[Batch]:
        return LazyBatches(len(self), self.batch_size, self._read)

    @property
    def labels(self) -> Tensor | None:
        return self._labels

    @property
    def fingerprint(self) -> str:
        return self._fingerprint

    def hashes(self) -> tuple[str, ...]:
        return self._hashes

    def renumber_(self, names: Sequence[str]) -> None:
        assert self._labels is not None
        self._labels = renumbered(self._labels, self.classes, names)
        self.classes = tuple(names)
        self._fingerprint = fingerprint(self._hashes, self._labels)

    def _read(self, start: int, stop: int) -> Batch:
        if self._pixels is not None:
            return {"pixel_values": torch.stack(self._pixels[start:stop])}
        return {"pixel_values": torch.stack([self._process(file) for file in self.files[start:stop]])}

    def _process(self, file: Any) -> Tensor:
        return self._processed(decoded(file) if isinstance(file, Path) else file.decoded())

    def _processed(self, image: Image.Image) -> Tensor:
        # One at a time, so that an image's pixels do not depend on its neighbours in the batch.
        with reading_with(DataError, "the base's image processor (preprocessor_config.json) fails on it"):
            pixels: Tensor = self._processor(images=image, return_tensors="pt")["pixel_values"][0].float()
        if not bool(torch.isfinite(pixels).all()):
            raise DataError("the base's image processor makes NaN or infinity of it")
        return pixels

    def _scan(self) -> tuple[str, ...]:
        """One hash per image; keeps the pixels if small. Raises DataError naming each damaged file."""
        hashes: list[str] = []
        turned: list[str] = []
        problems: list[Problem] = []
        shape: torch.Size | None = None
        for file in self.files:
            try:
                image = decoded(file) if isinstance(file, Path) else file.decoded()
                pixels = self._processed(image)
            except DataError as error:
                problems.append(Problem(str(file), error.message))
                continue
            if _is_turned(image):
                turned.append(str(file))
            shape = shape or pixels.shape
            if pixels.shape != shape:
                problems.append(
                    Problem(str(file), f"processed to {tuple(pixels.shape)}, the first to {tuple(shape)}")
                )
            hashes.extend(example_hashes({"pixel_values": pixels[None]}))
            if self._pixels is not None:
                self._pixels.append(pixels)
                if pixels.nbytes * len(self) > self._cache_bytes:
                    self._pixels = None
        if problems:
            raise DataError(
                f"{self._where}: {len(problems)} of {len(self)} images cannot be used",
                problems=problems[:10],
                remedy="Mend or remove these files.",
            )
        if turned:
            self.notes += (
                f"{self._where}: {len(turned)} of {len(self)} images say in EXIF that they are to be shown "
                f"turned or mirrored, first {turned[0]}: they are taken as they are stored. If the experts "
                "saw them upright, store them so.",
            )
        return tuple(hashes)


def image_processor(folder: Path, where: str) -> Any:
    """The processor that lies beside the base's weights, tried on a picture. Raises DataError if there is
    none that works."""
    from transformers import AutoImageProcessor

    if (found := open_clip_config(Path(folder))) is not None:
        with reading_with(DataError, f"{Path(folder) / 'open_clip_config.json'} makes no image processor"):
            own = _OpenClipProcessor(found)
        return _tried(own, Path(folder) / "open_clip_config.json")
    if (
        not (Path(folder) / "preprocessor_config.json").is_file()
        and not (Path(folder) / "processor_config.json").is_file()
    ):
        raise DataError(
            f"{where}: the base {folder} has no image processor (preprocessor_config.json)",
            remedy='Copy it from the model the base was made from, or give inputs as {"type": "tensors"}.',
        )
    files = [Path(folder) / name for name in ("preprocessor_config.json", "processor_config.json")]
    file = next(file for file in files if file.is_file())
    # Not where it is wanted: it is one file for all tasks, and is told once.
    with reading_with(DataError, f"the base's image processor {file} cannot be used", remedy=_SOUND):
        made = AutoImageProcessor.from_pretrained(folder, local_files_only=True)
    return _tried(made, file)


def _tried(processor: Any, file: Path) -> Any:
    """The processor, if it makes finite pixels of a plain picture."""
    plain = Image.new("RGB", (320, 256), (127, 90, 200))
    with reading_with(DataError, f"the base's image processor {file} fails on every picture", remedy=_SOUND):
        pixels = torch.as_tensor(processor(images=plain, return_tensors="pt")["pixel_values"][0]).float()
    if not bool(torch.isfinite(pixels).all()):
        asked = {key: value for key in _SCALING if (value := getattr(processor, key, None)) is not None}
        said = f" with {', '.join(f'{key} {value}' for key, value in asked.items())}" if asked else ""
        bad = int((~torch.isfinite(pixels)).sum())
        raise DataError(
            f"the base's image processor {file}{said} makes {bad} of {pixels.numel()} pixels of a picture "
            "NaN or infinite, expected finite numbers",
            remedy=_SOUND,
        )
    return processor


class _OpenClipProcessor:
    """open_clip's own transform for evaluation, as its preprocess_cfg says, called like transformers'."""

    def __init__(self, config: dict[str, Any]) -> None:
        from open_clip.transform import PreprocessCfg, image_transform_v2, merge_preprocess_dict

        size = config["model_cfg"]["vision_cfg"].get("image_size", PreprocessCfg.size)
        asked = {"size": size, **config["preprocess_cfg"]}
        self._transform = image_transform_v2(
            PreprocessCfg(**merge_preprocess_dict(PreprocessCfg(), asked)), is_train=False
        )

    def __call__(self, *, images: Image.Image, return_tensors: str) -> dict[str, Tensor]:
        return {"pixel_values": self._transform(images)[None]}


def decoded(file: Path | BinaryIO) -> Image.Image:
    """The image in RGB, 8 bits a channel, not turned by its EXIF. Raises DataError for a file that is no
    whole image, or whose pixels' range is not known."""
    if isinstance(file, Path) and file.is_symlink() and not file.exists():
        raise DataError(f'a link to "{os.readlink(file)}", which is not there')
    try:
        with Image.open(file) as image:
            if image.mode in ("I", "F") or image.mode.startswith("I;"):
                return _eight_bits(image)
            # Through RGBA where there is transparency: PIL warns of palettes with it, and drops it anyway.
            return (
                image.convert("RGBA").convert("RGB") if "transparency" in image.info else image.convert("RGB")
            )
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise DataError(f"not a whole image ({error})") from error


def _eight_bits(image: Image.Image) -> Image.Image:
    """Grey of 16 bits as RGB; PIL's own conversion would cut all above 255 off."""
    if image.mode.startswith("I;"):
        bits = tuple(getattr(image, "tag_v2", {}).get(258, (16,)))  # BitsPerSample of a TIFF
        known = bits == (16,)
        found = f"{bits[0]}-bit grey"
    else:
        known = image.mode == "I" and image.format in ("PNG", "PPM")  # 16 bits, as older PIL opens them
        found = (
            "32-bit floating-point grey" if image.mode == "F" else "grey of signed or 32-bit whole numbers"
        )
    if not known:
        raise DataError(
            f"{found} ({image.format}, mode {image.mode}), in which white is not known; expected 8 bits a "
            "channel, or 16-bit grey from 0 to 65535; store it so"
        )
    image.load()  # here, for numpy would hide that the file is cut off
    grey = (np.asarray(image).astype(np.uint32) + 128) // 257
    made = Image.fromarray(grey.astype(np.uint8)).convert("RGB")
    made.info = dict(image.info)
    return made


def _is_turned(image: Image.Image) -> bool:
    try:
        return image.getexif().get(ExifTags.Base.Orientation, 1) in range(2, 9)
    except Exception:  # EXIF that is damaged, whatever it holds, says nothing
        return False


def _listed(path: Path, where: str) -> Listing:
    """Class names, the images of each, and notes. Hidden files and folders do not count."""
    if not path.is_dir():
        kind = "is a file, expected a folder with one folder per class" if path.exists() else "does not exist"
        raise DataError(f"{where}: {path} {kind}")
    children = sorted(child for child in path.iterdir() if not child.name.startswith("."))
    if lost := [child for child in children if child.is_symlink() and not child.exists()]:
        raise DataError(
            f"{where}: {len(lost)} of what lies in {path} are links that lead nowhere",
            problems=[Problem(str(link), f'a link to "{os.readlink(link)}"') for link in lost[:10]],
            remedy="Mend or remove these links: a class may be missing.",
        )
    folders = [child for child in children if child.is_dir()]
    files = [sorted(file for file in folder.iterdir() if _is_image(file)) for folder in folders]
    if not any(files):
        found = f"{len(folders)} folders without images" if folders else "no folders"
        raise DataError(
            f"{where}: {path} has {found}, expected one folder per class",
            remedy=f"Images end in {', '.join(sorted(SUFFIXES))} and lie directly in their class's folder.",
        )
    empty = [folder.name for folder, inside in zip(folders, files, strict=True) if not inside]
    notes = [f"{where}: no images in class folders {', '.join(empty)}"] if empty else []
    if passed_over := _passed_over(children, folders):
        notes.append(f"{where}: not read in {path}: {passed_over}")
    return Listing(tuple(folder.name for folder in folders), files, tuple(notes), found=True)


def _passed_over(children: Sequence[Path], folders: Sequence[Path]) -> str:
    """What lies there and is not read, in words: other files by suffix, images of no class or too deep."""
    inside = [file for folder in folders for file in folder.iterdir() if not file.name.startswith(".")]
    other = Counter(
        file.suffix.lower() or "no suffix" for file in inside if file.is_file() and not _is_image(file)
    )
    loose = sum(_is_image(child) for child in children)
    deeper = sum(1 for folder in inside if folder.is_dir() for _ in _images_below(folder))
    kinds = ", ".join(f"{count} {suffix}" for suffix, count in other.most_common())
    told = (
        f"{other.total()} files of class folders that end otherwise ({kinds})" if other else "",
        f"{deeper} images in folders inside class folders" if deeper else "",
        f"{loose} images outside of class folders" if loose else "",
    )
    return "; ".join(filter(None, told))


def _images_below(folder: Path) -> Iterator[Path]:
    return (file for file in folder.rglob("*") if _is_image(file))


def _is_image(file: Path) -> bool:
    """By its name, and also a link that leads nowhere, which whoever opens it tells of."""
    known = not file.name.startswith(".") and file.suffix.lower() in SUFFIXES
    return known and (file.is_file() or (file.is_symlink() and not file.exists()))
