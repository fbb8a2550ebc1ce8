"""The header of a safetensors file: read, checked against the file, and written."""

from __future__ import annotations

import json
import os
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from merging.checkpoints.source import TensorSpec
from merging.errors import CheckpointError

_LONGEST = 100_000_000  # bytes of a header, the format's own limit
START = 512  # bytes that tell a file's kind
CHANGED = (
    "Let nothing write to it while a run reads it (a training, a download), see that it is whole, and run "
    "again: what was made from its former content is made anew."
)
_PACKED = {  # how files begin -> what packed them, and what unpacks them
    b"\x1f\x8b": ("gzip", "gunzip"),
    b"BZh": ("bzip2", "bunzip2"),
    b"\xfd7zXZ\x00": ("xz", "unxz"),
    b"\x28\xb5\x2f\xfd": ("zstd", "unzstd"),
    b"7z\xbc\xaf\x27\x1c": ("7z", "7z x"),
}

# In the format's own order. Within a file, tensors of the types last in this list come first.
DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3": torch.float8_e4m3fn,
    "I16": torch.int16,
    "U16": torch.uint16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "F32": torch.float32,
    "C64": torch.complex64,
    "F64": torch.float64,
    "I64": torch.int64,
    "U64": torch.uint64,
}
_CODES = {dtype: code for code, dtype in DTYPES.items()}
_RANKS = {dtype: rank for rank, dtype in enumerate(DTYPES.values())}


@dataclass(frozen=True)
class Place:
    """Where a tensor lies in its file: bytes `start` to `stop`, counted from the file's beginning."""

    spec: TensorSpec
    start: int
    stop: int


@dataclass(frozen=True)
class Header:
    """What a file holds, in the order of its bytes; `size` and `mtime_ns` are the file's at that time."""

    tensors: Mapping[str, Place]
    metadata: Mapping[str, str]
    size: int
    mtime_ns: int


def read_header(path: Path) -> Header:
    """The header, after every check that needs no tensor. Raises CheckpointError naming the file."""
    with path.open("rb") as file:
        status = os.fstat(file.fileno())
        start = file.read(START)
        _refuse_impostors(path, start, status.st_size)
        length = int.from_bytes(start[:8], "little")
        if length > _LONGEST or length < 2:
            raise _damaged(path, f"its header claims to be {length} bytes long, which cannot be")
        if 8 + length > status.st_size:
            raise _damaged(
                path,
                f"it is truncated: the header needs {8 + length} bytes, the file has {status.st_size}",
            )
        file.seek(8)
        text = file.read(length)
    entries = _parsed(path, text)
    metadata = _metadata(path, entries.pop("__metadata__", None))
    data = 8 + length
    places = {name: _place(path, name, entry, data) for name, entry in entries.items()}
    ordered = dict(sorted(places.items(), key=lambda item: (item[1].start, item[1].stop)))
    _check_extent(path, ordered, data, status.st_size)
    return Header(ordered, metadata, status.st_size, status.st_mtime_ns)


def write_header(
    specs: Mapping[str, TensorSpec], metadata: Mapping[str, str]
) -> tuple[bytes, dict[str, Place]]:
    """The bytes before the data, and where each tensor goes: laid out exactly as safetensors does it."""
    ordered = sorted(specs.items(), key=lambda item: (-_RANKS[item[1].dtype], item[0]))
    entries: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    offsets = {}
    for name, spec in ordered:
        offsets[name] = (offset, offset + spec.bytes)
        entries[name] = {
            "dtype": _CODES[spec.dtype],
            "shape": list(spec.shape),
            "data_offsets": list(offsets[name]),
        }
        offset += spec.bytes
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    data = 8 + len(text)
    places = {name: Place(specs[name], data + start, data + stop) for name, (start, stop) in offsets.items()}
    return len(text).to_bytes(8, "little") + text, places


def refuse_pointer(path: Path, start: bytes) -> None:
    """Raises CheckpointError if the file is empty or a git-LFS pointer; `start` is its first bytes."""
    if not start:
        raise CheckpointError(f"{path} is empty", remedy="Download or copy it again.")
    if start[:100].lstrip().lower().startswith((b"<!doctype", b"<html", b"<?xml")):
        raise CheckpointError(
            f"{path} is a web page, not weights: the server answered the download with an error or a login",
            remedy='Fetch it again, with a token if it is gated: "hf download".',
        )
    if start.startswith(b"version https://git-lfs"):
        raise CheckpointError(
            f"{path} is a git-LFS pointer, not the weights themselves",
            remedy='Fetch the weights with "git lfs pull" in that repository, or with "hf download".',
        )
    _refuse_packed(path, start)


def _refuse_packed(path: Path, start: bytes) -> None:
    if start[8:9] == b"{":  # a header, which by chance may be as long as those bytes say
        return
    for beginning, (kind, command) in _PACKED.items():
        if start.startswith(beginning):
            raise _packed(path, kind, command)
    if start[257:262] == b"ustar":
        raise _packed(path, "tar", "tar -xf")


def _is_plain_zip(path: Path) -> bool:
    """Whether it is an archive of files, and not the one that torch writes."""
    try:
        with zipfile.ZipFile(path) as archive:
            return not any(name.endswith("data.pkl") for name in archive.namelist())
    except (zipfile.BadZipFile, OSError, RuntimeError, ValueError):
        return False


def _packed(path: Path, kind: str, command: str) -> CheckpointError:
    return CheckpointError(
        f"{path} is packed with {kind}, expected the weights themselves",
        remedy=f'Unpack it first ("{command}"), and give it the name that it had.',
    )


def refuse_gguf(path: Path, start: bytes) -> None:
    """Raises CheckpointError, with the command that converts it, if the file is one of llama.cpp's."""
    if start.startswith(b"GGUF"):
        raise gguf_refusal(path)


def gguf_refusal(path: Path) -> CheckpointError:
    """Their weights are quantised, as a rule, and named in another way."""
    dense = path.with_suffix("").as_posix() + "-dense"
    load = f'from_pretrained("{path.parent.as_posix()}", gguf_file="{path.name}").save_pretrained("{dense}")'
    return CheckpointError(
        f"{path} is a GGUF file, whose weights are quantised and named as llama.cpp names them",
        remedy="Better use the checkpoint from which it was made. Else have transformers unpack it (it needs "
        f'"pip install gguf"), with what the packing has lost:\n'
        f"  AutoModelForCausalLM.{load}\n  AutoTokenizer.{load}",
    )


def _refuse_impostors(path: Path, start: bytes, size: int) -> None:
    refuse_pointer(path, start)
    refuse_gguf(path, start)
    if start.startswith(b"PK\x03\x04") and _is_plain_zip(path):
        raise _packed(path, "zip", "unzip")
    if start.startswith((b"PK\x03\x04", b"\x80\x02")):
        raise CheckpointError(f"{path} is a pickled torch file under a safetensors name")
    if size < 10:
        raise _damaged(path, f"it has only {size} bytes")


def _parsed(path: Path, text: bytes) -> dict[str, Any]:
    try:
        entries = json.loads(text, object_pairs_hook=lambda pairs: _without_repeats(path, pairs))
    except (ValueError, RecursionError) as error:
        reason = "is nested too deeply" if isinstance(error, RecursionError) else "is not valid JSON"
        raise _damaged(path, f"its header {reason}") from error
    if not isinstance(entries, dict):
        raise _damaged(path, f"its header is a {type(entries).__name__}, not an object")
    return entries


def _without_repeats(path: Path, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise _damaged(path, f'its header names "{name}" twice')
        found[name] = value
    return found


def _metadata(path: Path, found: Any) -> dict[str, str]:
    if found is None:
        return {}
    if not isinstance(found, dict) or not all(isinstance(value, str) for value in found.values()):
        raise _damaged(path, "its metadata is not a mapping of strings")
    return found


def _place(path: Path, name: str, entry: Any, data: int) -> Place:
    if not isinstance(entry, dict) or not isinstance(entry.get("dtype"), str):
        raise _damaged(path, f'its header says nothing usable of tensor "{name}"')
    code: str = entry["dtype"]
    shape: Any = entry.get("shape")
    offsets: Any = entry.get("data_offsets")
    if not _counts(shape) or not _counts(offsets) or len(offsets) != 2:
        raise _damaged(path, f'tensor "{name}" has shape {shape} and offsets {offsets}')
    if code not in DTYPES:
        raise CheckpointError(
            f'{path}: tensor "{name}" has dtype {code}, which is unknown or quantised and cannot be merged',
            remedy="Give the checkpoint in float32, float16 or bfloat16.",
        )
    spec = TensorSpec(tuple(shape), DTYPES[code])
    if offsets[1] - offsets[0] != spec.bytes:
        raise _damaged(
            path,
            f'tensor "{name}" of shape {shape} and dtype {code} needs {spec.bytes} bytes, '
            f"the header gives it {offsets[1] - offsets[0]}",
        )
    return Place(spec, data + offsets[0], data + offsets[1])


def _counts(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int and 0 <= value < 1 << 62 for value in values)


def _check_extent(path: Path, places: Mapping[str, Place], data: int, size: int) -> None:
    stop = data
    for name, place in places.items():
        if place.start != stop:
            raise _damaged(path, f'tensor "{name}" starts at byte {place.start}, expected {stop}')
        stop = place.stop
    if stop > size:
        raise _damaged(path, f"it is truncated: the header says {stop} bytes, the file has {size}")
    if stop < size:
        raise _damaged(path, f"it has {size - stop} bytes more than its header accounts for")


def _damaged(path: Path, what: str) -> CheckpointError:
    return CheckpointError(f"{path} is damaged: {what}", remedy="Download or copy it again.")
