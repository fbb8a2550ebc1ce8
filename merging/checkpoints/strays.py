"""Weights in a finished checkpoint's folder that the run did not write there: readers go by names, and would
take them for its own."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from merging.checkpoints.manifest import MANIFEST, listed_files
from merging.checkpoints.weight_files import is_weights
from merging.errors import OutputError, Problem

_ENDINGS = (".safetensors", ".safetensors.index.json")
_ADAPTER = "adapter_config.json"  # by which transformers and PEFT take a folder for an adapter


def is_read_as_weights(file: Path) -> bool:
    """Whether somebody who opens its folder may take this file for weights of the checkpoint, which always
    is safetensors: pickles, GGUF and the like beside it are passed over, and so are hidden files, as macOS
    leaves beside those that it copies."""
    if file.name.startswith("."):
        return False
    if file.name == _ADAPTER:
        return file.is_symlink() or file.is_file()
    return file.name.endswith(_ENDINGS) and is_weights(file)


def strays(checkpoint: Path, listed: Collection[str] | None = None) -> list[Path]:
    """Weights, and indexes of weights, that lie there and are not listed. `listed`: names of all files of
    ours, by the folder's manifest if not given; nothing is stray where there is none."""
    ours = listed_files(checkpoint) if listed is None else listed
    if ours is None or not checkpoint.is_dir():
        return []
    return [
        file for file in sorted(checkpoint.iterdir()) if file.name not in ours and is_read_as_weights(file)
    ]


def refuse_strays(checkpoint: Path, found: list[Path]) -> None:
    """Raise OutputError where there are any."""
    if not found:
        return
    raise OutputError(
        f"{checkpoint} is finished, but is not what the run wrote there: weights were put beside its own",
        problems=[
            Problem(str(file), f"is not listed in {MANIFEST}; who opens the folder may read it as the model")
            for file in found
        ],
        remedy="Move these files away; or use --overwrite: then they are moved into a folder beside the "
        "weights, and the checkpoint is made again.",
    )
