"""TorchBinSource: state dicts that torch.save pickled, read under tensors-only rules."""

from __future__ import annotations

import pickle
import pickletools
import warnings
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from merging.checkpoints.header import START, refuse_gguf, refuse_pointer
from merging.checkpoints.source import CheckpointSource, TensorSpec
from merging.checkpoints.weight_files import find_pickled
from merging.errors import CheckpointError, Problem
from merging.spec.wording import counted

_WRAPPERS = ("state_dict", "model_state_dict", "model", "module")  # where training loops put the weights

_PICKLES = 5  # that the older format begins with: magic number, version, system, tensors, storages
_STEPS, _OPEN = 1_000_000, 1000  # of a pickle, which has some 30 for a tensor, and a handful open at a time
_BYTES, _MOST = 8, 10_000_000  # a larger file may take a step for so many bytes; a tensor takes 300 at least
_CLOSING = frozenset(op.name for op in pickletools.opcodes if pickletools.markobject in op.stack_before)


class TorchBinSource(CheckpointSource):
    """A folder with `pytorch_model.bin` (or its index), or one `.bin`, `.pt`, `.pth` or `.ckpt` file.

    A file that needs anything but tensors to be built is refused before any of it is. Data is mapped into
    memory.
    """

    def __init__(self, path: Path, label: str = "") -> None:
        self.label = label or str(path)
        found = find_pickled(path)
        if found is None:
            raise CheckpointError(f"{path} holds no pickled state dict")
        self.files, self.ignored = found.files, found.ignored
        self.notes = (found.warning,) if found.warning else ()
        for file in found.files:
            _refuse_code(file)
        self._tensors: dict[str, Tensor] = {}
        self._homes: dict[str, str] = {}
        for file in found.files:
            tensors, notes = _load(file)
            self.notes += notes
            for name, tensor in tensors.items():
                if found.placement is None or found.placement.get(name) == file.name:
                    self._tensors[name] = tensor
                    self._homes[name] = file.name
                else:
                    self.notes += (f'{file.name} also holds "{name}", which the index does not place there',)
        self._sharded = found.placement is not None
        lost = [name for name in found.placement or () if name not in self._tensors]
        if lost:
            raise CheckpointError(
                f"{found.index} names {counted(len(lost), 'tensor')} that its files do not hold",
                problems=[Problem((found.placement or {})[name], f'has no "{name}"') for name in lost[:10]],
            )

    def names(self) -> tuple[str, ...]:
        return tuple(self._tensors)

    def spec(self, name: str) -> TensorSpec:
        tensor = self._get(name)
        return TensorSpec(tuple(tensor.shape), tensor.dtype)

    def read(self, name: str, rows: slice | None = None) -> Tensor:
        tensor = self._get(name)
        return tensor if rows is None else tensor[rows]

    def shard(self, name: str) -> str | None:
        self._get(name)
        return self._homes[name] if self._sharded else None

    def _get(self, name: str) -> Tensor:
        if name not in self._tensors:
            raise CheckpointError(f'{self.label} has no tensor "{name}"')
        return self._tensors[name]


def _refuse_code(file: Path) -> None:
    """Raises CheckpointError if the content takes more than tensors to build; builds nothing."""
    with file.open("rb") as stream:
        start = stream.read(START)
    refuse_pointer(file, start)
    refuse_gguf(file, start)
    if not start.startswith(b"PK"):
        with file.open("rb") as stream:
            _refuse_endless(file, stream, _PICKLES)
        return  # the older format: torch's tensors-only reader stops at the first thing that is not one
    try:
        with zipfile.ZipFile(file) as archive:
            names = archive.namelist()
            for name in names:
                if name == "data.pkl" or name.endswith("/data.pkl"):
                    with archive.open(name) as pickled:
                        _refuse_endless(file, pickled, 1)
    except (zipfile.BadZipFile, OSError, RuntimeError, zlib.error) as error:
        raise _damaged(file, "its archive cannot be read; it may be truncated") from error
    if any(name.endswith("/constants.pkl") for name in names):
        raise _unsafe(file, "a TorchScript program")
    if not any(name.endswith("/data.pkl") or name == "data.pkl" for name in names):
        raise _damaged(file, "it is an archive without pickled tensors")
    try:
        unsafe = torch.serialization.get_unsafe_globals_in_checkpoint(file)
    except Exception as error:  # whatever a broken or hostile pickle makes torch's disassembler raise
        raise _damaged(file, f"its pickle cannot be taken apart ({type(error).__name__})") from error
    if unsafe:
        raise _unsafe(file, ", ".join(sorted(unsafe)[:3]))


def _refuse_endless(file: Path, stream: IO[bytes], count: int) -> None:
    """Raises CheckpointError for pickles that torch would be busy with for minutes; what is no pickle is left
    to its reader."""
    most = min(max(_STEPS, file.stat().st_size // _BYTES), _MOST)
    steps = opened = 0
    try:
        for _ in range(count):
            for operation, _, _ in pickletools.genops(stream):
                steps += 1
                opened += (operation.name == "MARK") - (operation.name in _CLOSING)
                if opened > _OPEN or steps > most:
                    what = (
                        f"opens more than {_OPEN} containers and closes none"
                        if opened > _OPEN
                        else f"takes more than {most} steps"
                    )
                    raise _damaged(file, f"its pickle {what}, expected some 30 steps for each tensor")
    except (ValueError, EOFError, UnicodeError, OverflowError, MemoryError, AttributeError):
        return


def _load(file: Path) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of other pickle protocols and of sparse tensors: told below
            found = torch.load(file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file))
    except pickle.UnpicklingError as error:
        raise _unsafe(file, "something that is not a tensor") from error
    except Exception as error:  # torch raises RuntimeError, EOFError, KeyError, ... for files that are broken
        first = (str(error) or type(error).__name__).strip().split("\n")[0]
        raise _damaged(file, first) from error
    return _state_dict(file, found)


def _state_dict(file: Path, found: Any) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    notes: tuple[str, ...] = ()
    path: list[str] = []
    while isinstance(found, Mapping) and not any(isinstance(value, Tensor) for value in found.values()):
        key = next((key for key in _WRAPPERS if isinstance(found.get(key), Mapping)), None)
        if key is None:
            break
        path.append(key)
        others = ", ".join(str(other) for other in found if other != key)
        notes += (f'{file}: read from "{".".join(path)}"' + (f"; ignored: {others}" if others else ""),)
        found = found[key]
    if not isinstance(found, Mapping):
        raise CheckpointError(
            f"{file} holds a {type(found).__name__}, expected a mapping of names to tensors",
            remedy="Save model.state_dict() instead.",
        )
    tensors = {name: value.detach() for name, value in found.items() if isinstance(value, Tensor)}
    other = [str(name) for name, value in found.items() if not isinstance(value, Tensor)]
    if other:
        notes += (f"{file}: entries that are not tensors are ignored: {', '.join(other[:10])}",)
    for name, tensor in tensors.items():
        if not isinstance(name, str):
            raise CheckpointError(f"{file} names a tensor {name!r}, expected text")
        if tensor.layout != torch.strided or tensor.is_quantized:
            kind = str(tensor.dtype if tensor.is_quantized else tensor.layout).removeprefix("torch.")
            raise CheckpointError(f'{file}: tensor "{name}" is {kind}, expected a plain one')
    return tensors, notes


def _unsafe(file: Path, what: str) -> CheckpointError:
    return CheckpointError(
        f"{file} holds code and not only tensors ({what}); it was not loaded",
        remedy="Ask for it as safetensors, or convert it where it was made: there, with its own code,\n"
        '  safetensors.torch.save_model(model, "model.safetensors")  writes the tensors alone.',
    )


def _damaged(file: Path, what: str) -> CheckpointError:
    return CheckpointError(f"{file} is damaged: {what}", remedy="Download or copy it again.")
