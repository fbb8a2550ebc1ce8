"""Which files of a folder hold the weights: one rule, and a list of what it passes over.

The rule: `model.safetensors.index.json` and the shards that it names; else `model.safetensors`; else the
same for `open_clip_model` and `diffusion_pytorch_model`; else the only safetensors file there is. If there
is none at all, the same for `pytorch_model.bin`. Everything else that looks like weights is ignored, and
said to be.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path

from merging.errors import CheckpointError, Problem
from merging.spec.wording import shortened

_WEIGHTS = (
    "*.safetensors",
    "*.bin",
    "*.pt",
    "*.pth",
    "*.ckpt",
    "*.gguf",
    "*.h5",
    "*.msgpack",
    "*.onnx",
    "*.index.json",
)
_TRAINING = (
    "training_args.bin",
    "optimizer*",
    "scheduler*",
    "scaler*",
    "rng_state*",
)  # never weights of the model
_ADAPTER = ("adapter_model*", "adapter*.safetensors")
_PICKLED = (".bin", ".pt", ".pth", ".ckpt")
_PREFERRED = ("model.safetensors", "open_clip_model.safetensors", "diffusion_pytorch_model.safetensors")
_PREFERRED_PICKLED = ("pytorch_model.bin", "open_clip_pytorch_model.bin", "diffusion_pytorch_model.bin")


@dataclass(frozen=True)
class WeightFiles:
    """The files to read. `placement`: tensor -> file, if an index says so. `ignored`: weights not read."""

    files: tuple[Path, ...]
    placement: Mapping[str, str] | None = None
    index: Path | None = None
    ignored: tuple[Path, ...] = field(default=())

    @property
    def warning(self) -> str:
        """What a user should know of files that are there and not read; empty if there are none."""
        if not self.ignored:
            return ""
        used = self.index.name if self.index is not None else self.files[0].name
        names = ", ".join(path.name for path in self.ignored)
        return f"{self.files[0].parent}: weights are read from {used}; ignored: {names}"


def find_safetensors(path: Path) -> WeightFiles | None:
    """The safetensors of a folder, or that one file; None if there are none."""
    return _find(path, (".safetensors",), _PREFERRED)


def find_pickled(path: Path) -> WeightFiles | None:
    """The pickled state dict of a folder, or that one file; None if there is none."""
    return _find(path, _PICKLED, _PREFERRED_PICKLED)


def _find(path: Path, endings: tuple[str, ...], preferred: tuple[str, ...]) -> WeightFiles | None:
    refuse_dangling(path)
    if path.is_file():
        return WeightFiles((path,)) if path.suffix in endings else None
    if not path.is_dir():  # a pipe would be waited for without end
        raise CheckpointError(f"{path} is neither a file nor a folder")
    present = {file.name: file for file in sorted(path.iterdir()) if is_weights(file)}
    indexes = [name for name in present if any(name.endswith(f"{ending}.index.json") for ending in endings)]
    singles = [name for name in present if name.endswith(endings)]
    for name in preferred:
        if f"{name}.index.json" in indexes:
            return _by_index(path, present[f"{name}.index.json"], present)
        if name in singles:
            return _checked(path, (present[name],), present)
    if len(indexes) == 1:
        return _by_index(path, present[indexes[0]], present)
    if len(singles) == 1:
        return _checked(path, (present[singles[0]],), present)
    if singles:
        raise CheckpointError(
            f"{path} holds {len(singles)} weight files and no index that says which belong together: "
            f"{', '.join(singles[:3])}",
            remedy=f"Give the path of one file, or add {preferred[0]}.index.json.",
        )
    return None


def _by_index(folder: Path, index: Path, present: Mapping[str, Path]) -> WeightFiles:
    placement = read_index(index)
    names = sorted(set(placement.values()))
    missing = [name for name in names if name not in present]
    if missing:
        raise CheckpointError(
            f"{index} names {len(names)} files, {len(missing)} of them missing",
            problems=[Problem(name, "is not there") for name in missing[:10]],
            remedy="Download or copy them again.",
        )
    return _checked(folder, tuple(present[name] for name in names), present, placement, index)


def _checked(
    folder: Path,
    files: tuple[Path, ...],
    present: Mapping[str, Path],
    placement: Mapping[str, str] | None = None,
    index: Path | None = None,
) -> WeightFiles:
    for file in files:
        refuse_dangling(file)
        refuse_outside(folder, file)
    read = {file.name for file in files} | ({index.name} if index is not None else set())
    return WeightFiles(
        files, placement, index, tuple(file for name, file in present.items() if name not in read)
    )


def read_index(path: Path) -> dict[str, str]:
    """Tensor -> file name. Raises CheckpointError for names that are more than a file name."""
    refuse_dangling(path)
    try:
        found = json.loads(path.read_bytes())
        placement = found["weight_map"]
        right = isinstance(placement, dict) and all(isinstance(name, str) for name in placement.values())
    except (ValueError, RecursionError, KeyError, TypeError) as error:
        raise CheckpointError(f'{path} is damaged: no readable "weight_map" in it') from error
    if not right or not placement:
        raise CheckpointError(f'{path} is damaged: its "weight_map" is not a mapping of tensors to files')
    for tensor, name in placement.items():
        if name in ("", ".", "..") or "/" in name or "\\" in name or "\0" in name:
            raise CheckpointError(
                f'{path} is unsafe: it places "{tensor}" in "{name}", which is not a file of this folder'
            )
    return placement


def refuse_dangling(file: Path) -> None:
    """Raise CheckpointError for a link to a file that is not there: pruned from a cache, or not fetched."""
    if not file.is_symlink() or file.exists():
        return
    try:
        target = str(file.resolve())
    except (OSError, RuntimeError):  # links in a ring, see `refuse_outside`
        return
    annexed = "annex/objects" in target
    remedy = f'Fetch it with "git annex get {file.name}" in that repository' if annexed else "Fetch it again"
    raise CheckpointError(
        f"{file} is a link that leads nowhere: {shortened(target)} does not exist",
        remedy=f"{remedy}, or put the file itself there.",
    )


def refuse_outside(folder: Path, file: Path) -> None:
    """Links may lead within the folder or, as in the hub's cache, to a blob of the same repository."""
    try:
        target, home = file.resolve(), folder.resolve()
    except (OSError, RuntimeError) as error:  # RuntimeError: links in a ring, before Python 3.13
        raise CheckpointError(
            f"{file} is a link that leads to no file: it comes back to itself",
            remedy="Put the file itself there, or remove the link.",
        ) from error
    if target.is_relative_to(home):
        return
    for parent in (home, *home.parents):
        if parent.name == "snapshots" and target.is_relative_to(parent.parent / "blobs"):
            return
    raise CheckpointError(
        f"{file} is a link that leads out of the checkpoint, to {target}",
        remedy="Put the file itself there, or give its own path.",
    )


def is_weights(file: Path) -> bool:
    """Whether it looks like weights of a whole model, or their index; adapters do not count."""
    if (file.exists() and not file.is_file()) or any(
        fnmatch(file.name, pattern) for pattern in (*_TRAINING, *_ADAPTER)
    ):
        return False
    return any(fnmatch(file.name, pattern) for pattern in _WEIGHTS)
