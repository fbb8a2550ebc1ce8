"""Numbers of a config that its weights cannot bear out: refused before a model of such a size is built."""

from __future__ import annotations

import re
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from merging.checkpoints.header import read_header
from merging.checkpoints.weight_files import find_pickled, find_safetensors
from merging.errors import CheckpointError, Problem

# What any machine builds in no time, so that a wrong number within it is told by the tensors that do not fit.
_LAYERS, _WIDTH, _POSITIONS, _LEARNED_POSITIONS = 1024, 2**16, 2**24, 2**14
_UNKNOWN = 2**20  # the longest axis, where no weights lie beside the config
_MARGIN = 16  # times the longest axis: heads side by side, several matrices in one

_COUNTED = re.compile(r"layers?|depths?|n_layers?|\w*_(layers?|blocks|groups|experts)|num_stages")
_NO_COUNT = re.compile(r"max_window_layers|\w*dropout\w*|\w*_(id|idx|index|indices)_\w*")
_WIDE = re.compile(
    r"dim|width|heads|d_model|d_ff|d_kv|d_inner|n_embd|n_inner|n_heads?|num_labels|num_channels|num_classes"
    r"|num_mel_bins|\w*(hidden|intermediate|vocab|embedding|projection|inner|ffn|state|kernel|patch|image)_size"
    r"|\w*_dim|\w*_(heads|rank|channels)|hidden_sizes|image_size|patch_size|vocab_size|num_buckets"
)
_LEARNED = re.compile(r"n_positions|n_ctx|context_length|num_positions|max_(source|target)_positions")
_PLACES = re.compile(r"\w*max_position_embeddings|max_seq_len(gth)?|\w*sequence_length")


class _Held(NamedTuple):
    """What weights hold: number of tensors, and the longest axis of any."""

    tensors: int
    longest: int


def refuse_unbounded(file: Path, config: Mapping[str, Any], weights: Path) -> None:
    """Raise CheckpointError for numbers in `config`, read from `file`, far beyond what `weights` hold.

    `weights`: the folder or file of the checkpoint; of what is no safetensors, size and entries count.
    """
    suspects = [(where, key, value) for where, key, value in _numbers(config) if _least(key) < value]
    grids = list(_grids(config))
    if not suspects and not grids:
        return
    held = _held(weights)
    problems = [
        Problem(where, f"found {_written(value)}, expected at most {bound}: {_why(key, held)}")
        for where, key, value in suspects
        if value > (bound := _bound(key, held))
    ]
    problems += [
        Problem(where, f"found {_written(value)}, expected at most {bound}: {_why('image_size', held)}")
        for where, value, patch in grids
        if value > (bound := int(max(_POSITIONS, _MARGIN * held.longest) ** 0.5) * patch)
    ]
    if problems:
        raise CheckpointError(
            f"{file} asks for a model far larger than its weights",
            problems=problems[:10],
            remedy="Get config and weights from one place.",
        )


def _numbers(value: Any, where: str = "", key: str = "", depth: int = 0) -> Iterator[tuple[str, str, int]]:
    """Where it stands, by which name, and the number; lists by the name that they have."""
    if type(value) is int:
        yield where, key, value
    elif depth < 8 and isinstance(value, Mapping):
        for name, part in value.items():
            yield from _numbers(part, f"{where}.{name}" if where else str(name), str(name), depth + 1)
    elif depth < 8 and isinstance(value, list):
        for index, part in enumerate(value[:1000]):
            yield from _numbers(part, f"{where}.{index}", key, depth + 1)


def _grids(config: Mapping[str, Any], where: str = "") -> Iterator[tuple[str, int, int]]:
    """Images cut into more patches than anybody counts: where, length of the image, length of a patch."""
    image, patch = config.get("image_size"), config.get("patch_size")
    if type(image) is int and type(patch) is int and patch > 0 and (image // patch) ** 2 > _POSITIONS:
        yield f"{where}image_size", image, patch
    for name, part in config.items():
        if isinstance(part, Mapping) and where.count(".") < 8:
            yield from _grids(part, f"{where}{name}.")


def _least(key: str) -> float:
    """Up to which no weights need be asked."""
    if _COUNTED.fullmatch(key) and not _NO_COUNT.fullmatch(key):
        return _LAYERS
    if _LEARNED.fullmatch(key):
        return _LEARNED_POSITIONS
    if _PLACES.fullmatch(key):
        return _POSITIONS
    return _WIDTH if _WIDE.fullmatch(key) else float("inf")


def _bound(key: str, held: _Held) -> int:
    least = int(_least(key))
    if least == _LAYERS:
        return max(least, held.tensors)
    return max(least, held.longest if least == _LEARNED_POSITIONS else _MARGIN * held.longest)


def _why(key: str, held: _Held) -> str:
    if _least(key) == _LAYERS:
        return f"the weights hold {held.tensors} tensors"
    return f"the longest axis of a tensor in the weights is {held.longest} at most"


def _written(value: int) -> str:
    return str(value) if value < 10**18 else "a number of more than 18 digits"


def _held(weights: Path) -> _Held:
    if (safe := find_safetensors(weights)) is not None:
        specs = [place.spec for file in safe.files for place in read_header(file).tensors.values()]
        return _Held(len(specs), max((size for spec in specs for size in spec.shape), default=0))
    if (pickled := find_pickled(weights)) is None:
        return _Held(0, _UNKNOWN)
    entries, files = 0, pickled.files
    for file in files:
        if zipfile.is_zipfile(file):
            with zipfile.ZipFile(file) as archive:
                entries += len(archive.namelist())
    return _Held(entries, sum(file.stat().st_size for file in files) // (2 * _MARGIN))
