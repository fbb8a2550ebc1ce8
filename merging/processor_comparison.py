"""compare_processors: where an expert's image processor or tokenizer makes other inputs than the base's."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from merging.checkpoints.folder import open_clip_config
from merging.checkpoints.vocabularies import SETTINGS, TOKENIZER
from merging.errors import DataError
from merging.libraries import reading_with
from merging.spec.wording import shortened

IMAGES = ("preprocessor_config.json", "processor_config.json")
_CHAT = "chat_template"
_AROUND_TEXT = {_CHAT, "padding_side", "truncation_side", "model_max_length", "max_length", "pad_token"}
_PROBES = ("Hello World,  it's 2 o'clock", " ÀÉ ñ ß 你好 :-)")  # capitals, accents, spaces

_OF_NO_MEANING = re.compile(  # in settings of processors and tokenizers
    r"_.*|.*_version|name_or_path|processor_class|auto_map|use_fast|return_tensors|(input_)?data_format"
    r"|device|backend|is_local|local_files_only|.*_file|added_tokens_decoder|additional_special_tokens"
    r"|extra_special_tokens|clean_up_tokenization_spaces|tokenizer_class|legacy|disable_grouping"
)
_KIND = re.compile(r"(ImageProcessor|FeatureExtractor)(Fast|Pil)?$")


class Differences(NamedTuple):
    """`said`: what the expert's has, and the base's, a sentence each. `shapes`: how the pictures' shapes
    differ; empty where they do not."""

    said: tuple[str, ...]
    shapes: str = ""


def compare_processors(base: Path, expert: Path) -> Differences:
    """Empty where one of them has no such files. Loads libraries only where the files differ."""
    images = _compare_images(base, expert)
    return Differences((*images.said, *_compare_tokenizers(base, expert)), images.shapes)


def _compare_images(base: Path, expert: Path) -> Differences:
    ours, theirs = _image_settings(base), _image_settings(expert)
    if not ours or not theirs or ours == theirs:
        return Differences(())
    from merging.data.images import image_processor

    try:
        made = [image_processor(folder, "") for folder in (base, expert)]
        ours, theirs = (_effective(one, raw) for one, raw in zip(made, (ours, theirs), strict=True))
        shapes = [_shape(one) for one in made]
    except DataError:  # told by who needs it; what the files say can be compared as it stands
        shapes = []
    said = tuple(f"image processor: {one}" for one in _differing(ours, theirs))
    if len(set(shapes)) < 2:
        return Differences(said)
    return Differences(said, f"its image processor makes pictures of {shapes[1]}, the base's of {shapes[0]}")


def _image_settings(folder: Path) -> dict[str, Any]:
    if not folder.is_dir():
        folder = folder.parent
    if (found := open_clip_config(folder)) is not None:
        size = found["model_cfg"]["vision_cfg"].get("image_size")
        return _meaningful({"size": size, **found["preprocess_cfg"]})
    for name in IMAGES:
        found = _json(folder / name)
        inner = found.get("image_processor") if name == IMAGES[1] else found
        if isinstance(inner, dict) and inner:
            return _meaningful(inner)
    return {}


def _effective(processor: Any, raw: dict[str, Any]) -> dict[str, Any]:
    """All settings with the library's defaults, where it tells them."""
    if not hasattr(processor, "to_json_string"):
        return raw
    return _meaningful(json.loads(processor.to_json_string()))


def _meaningful(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Without what changes no input; classes of one name count as one, whatever library they run on."""
    found = {key: value for key, value in settings.items() if not _OF_NO_MEANING.fullmatch(key)}
    kinds = [found.pop(key, None) for key in ("image_processor_type", "feature_extractor_type")]
    kind = next((str(one) for one in kinds if one), None)
    return found if kind is None else {"image_processor_type": _KIND.sub("ImageProcessor", kind), **found}


def _shape(processor: Any) -> str:
    from PIL import Image

    plain = Image.new("RGB", (320, 256), (127, 90, 200))
    return " x ".join(map(str, processor(images=plain, return_tensors="pt")["pixel_values"][0].shape))


def _compare_tokenizers(base: Path, expert: Path) -> list[str]:
    ours, theirs = _tokenizer_files(base), _tokenizer_files(expert)
    if not ours or not theirs or _same_files(ours, theirs):
        return []
    known, found = _settings_of(ours), _settings_of(theirs)
    said = _differing(known, found, shared=True)
    if (known.get(_CHAT) is None) != (found.get(_CHAT) is None):
        said.append(f"{_CHAT} {_shown(found.get(_CHAT))}, the base has {_shown(known.get(_CHAT))}")
    stages = _stages(ours), _stages(theirs)
    changed = {key for key in known.keys() | found.keys() if known.get(key) != found.get(key)}
    if stages[0] != stages[1] or not changed <= _AROUND_TEXT:
        read = _read_otherwise(base, expert)
        said += _differing(*stages) if read is None else read
    return [f"tokenizer: {one}" for one in said]


def _tokenizer_files(folder: Path) -> dict[str, Path]:
    if not folder.is_dir():
        folder = folder.parent
    names = (TOKENIZER, SETTINGS, "special_tokens_map.json", "chat_template.jinja")
    files = {name: folder / name for name in names if (folder / name).is_file()}
    return files if TOKENIZER in files or SETTINGS in files else {}


def _same_files(ours: Mapping[str, Path], theirs: Mapping[str, Path]) -> bool:
    return ours.keys() == theirs.keys() and all(
        file.stat().st_size == theirs[name].stat().st_size and file.read_bytes() == theirs[name].read_bytes()
        for name, file in ours.items()
    )


def _settings_of(files: Mapping[str, Path]) -> dict[str, Any]:
    """Special tokens by their text."""
    found = {**_json(files.get("special_tokens_map.json")), **_json(files.get(SETTINGS))}
    if (template := files.get("chat_template.jinja")) is not None:
        found[_CHAT] = template.read_text(encoding="utf-8", errors="replace")
    return {
        key: value["content"] if isinstance(value, dict) and "content" in value else value
        for key, value in found.items()
        if not _OF_NO_MEANING.fullmatch(key)
    }


def _stages(files: Mapping[str, Path]) -> dict[str, Any]:
    """What tokenizer.json does with a text, but for its table of tokens, which is compared by itself."""
    found = _json(files.get(TOKENIZER))
    return {key: found.get(key) for key in ("normalizer", "pre_tokenizer", "post_processor")}


def _read_otherwise(base: Path, expert: Path) -> list[str] | None:
    """Where the two make other tokens of the same text; None where one of them cannot be opened."""
    from transformers import AutoTokenizer

    made = []
    try:
        for folder in (base, expert):
            with reading_with(DataError, f"the tokenizer in {folder} cannot be used"):
                open_as: Any = AutoTokenizer.from_pretrained
                tokenizer = open_as(folder, local_files_only=True, trust_remote_code=False)
                made.append(
                    [tokenizer.convert_ids_to_tokens(tokenizer(text)["input_ids"]) for text in _PROBES]
                )
    except DataError:
        return None
    for text, ours, theirs in zip(_PROBES, *made, strict=True):
        if ours != theirs:
            return [f"{text!r} is {shortened(str(theirs), 200)}, to the base's {shortened(str(ours), 200)}"]
    return []


def _differing(ours: Mapping[str, Any], theirs: Mapping[str, Any], *, shared: bool = False) -> list[str]:
    """`shared`: of what both say only, where the defaults of what is left out are not known."""
    keys = [key for key in dict.fromkeys([*ours, *theirs]) if ours.get(key) != theirs.get(key)]
    if shared:
        keys = [key for key in keys if key in ours and key in theirs]
    return [f"{key} {_shown(theirs.get(key))}, the base has {_shown(ours.get(key))}" for key in keys]


def _shown(value: Any) -> str:
    return "none" if value is None else shortened(json.dumps(value, ensure_ascii=False))


def _json(file: Path | None) -> dict[str, Any]:
    """Empty for what is not there or not readable, which whoever needs it tells."""
    try:
        found = json.loads(file.read_bytes()) if file is not None and file.is_file() else {}
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
