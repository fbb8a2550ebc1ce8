"""The files of a checkpoint that are not weights: which go with every copy of it, and which do not."""

from __future__ import annotations

import os
from fnmatch import fnmatch
from pathlib import Path
from typing import NamedTuple

from merging.checkpoints.weight_files import is_weights, refuse_outside
from merging.errors import CheckpointError, Problem

_KNOWN = (
    "config.json",
    "generation_config.json",
    "open_clip_config.json",
    # tokenizers of all kinds
    "tokenizer*.json",
    "tokenizer.model*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab*.json",
    "vocab*.txt",
    "vocab.*",
    "merges.txt",
    "bpe.codes",
    "*.tiktoken",
    "*.spm",
    "spiece.model",
    "spm.model",
    "sentencepiece*.model",
    "tekken.json",
    "normalizer.json",
    "chat_template.*",
    "chat_templates/*",
    "additional_chat_templates/*",
    # processors
    "preprocessor_config.json",
    "processor_config.json",
    "image_processor*.json",
    "video_preprocessor_config.json",
    "feature_extractor*.json",
    # sentence-transformers: its list of modules and a numbered folder for each
    "modules.json",
    "sentence_*_config.json",
    "config_sentence_transformers.json",
    "[0-9]_*/*",
    "[0-9][0-9]_*/*",
    # terms of use stay with the weights
    "LICENSE*",
    "NOTICE*",
    "USE_POLICY*",
)
_REPLACED = ("README*", "manifest.json")  # the copy gets its own


class SideFiles(NamedTuple):
    """Names relative to the folder. `unknown` are not copied; program files (*.py) never are."""

    known: tuple[str, ...]
    unknown: tuple[str, ...]


def side_files(folder: Path) -> SideFiles:
    """What lies beside the weights; hidden files are passed over."""
    known: list[str] = []
    unknown: list[str] = []
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_dir() or any(part.startswith(".") for part in Path(name).parts):
            continue
        if any(fnmatch(name, pattern) for pattern in _REPLACED) or ("/" not in name and is_weights(path)):
            continue
        is_known = not name.endswith(".py") and any(_matches(name, pattern) for pattern in _KNOWN)
        (known if is_known else unknown).append(name)
    return SideFiles(tuple(known), tuple(unknown))


def refuse_unfit_side_files(folder: Path) -> None:
    """Raise CheckpointError for all that a result would be given and that is no readable file of the folder:
    pipes, which would be waited for without end, links that lead out of it or nowhere."""
    problems = []
    for name in side_files(folder).known:
        file = folder / name
        try:
            refuse_outside(folder, file)
        except CheckpointError as error:
            problems.append(Problem(name, error.message, error.remedy))
            continue
        if not file.is_file():
            what = "a link that leads nowhere" if file.is_symlink() else "a pipe, a socket or a device"
            problems.append(
                Problem(name, f"found {what}, expected a file", "Put the model's own there, or remove it.")
            )
        elif not os.access(file, os.R_OK):
            problems.append(Problem(name, "cannot be read: Permission denied", "Make it readable."))
    if problems:
        raise CheckpointError(
            f"{folder} has files beside its weights that cannot go into a result", problems=problems
        )


def _matches(name: str, pattern: str) -> bool:
    return name.count("/") == pattern.count("/") and fnmatch(name, pattern)
