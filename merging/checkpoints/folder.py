"""Opening a checkpoint: the right reader for a folder or file, its config, and refusals that say why."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from merging.checkpoints.header import gguf_refusal
from merging.checkpoints.quantised import refuse_quantised
from merging.checkpoints.safetensors import SafetensorsSource
from merging.checkpoints.side_files import SideFiles as SideFiles
from merging.checkpoints.side_files import side_files as side_files
from merging.checkpoints.source import CheckpointSource
from merging.checkpoints.torch_bin import TorchBinSource
from merging.checkpoints.weight_files import find_pickled, find_safetensors, refuse_dangling
from merging.errors import CheckpointError
from merging.registry import nearest
from merging.spec.wording import shortened

_OTHER_FORMATS = {
    ".ggml": "GGML, whose weights are quantised",
    ".h5": "TensorFlow",
    ".msgpack": "Flax",
    ".onnx": "ONNX",
    ".npz": "NumPy",
    ".tflite": "TensorFlow Lite",
}


def open_checkpoint(path: Path, label: str = "") -> CheckpointSource:
    """A folder or a file of weights, safetensors before pickled ones; headers are read, no data.

    `notes` of the result say what lies there and is not read. Raises CheckpointError.
    """
    label = label or str(path)
    try:
        there = path.exists()
    except (OSError, ValueError) as error:  # longer than any file system takes, or links in a ring
        reason = error.strerror if isinstance(error, OSError) else error
        raise CheckpointError(f"{label}: {shortened(str(path))} cannot be looked at: {reason}") from error
    if not there:
        raise missing(path)
    refuse_unfinished(path)
    source: CheckpointSource
    if find_safetensors(path) is not None:
        source = SafetensorsSource(path, label)
    elif find_pickled(path) is not None:
        source = TorchBinSource(path, label)
    else:
        raise _nothing_to_read(path)
    if not source.names():
        raise CheckpointError(f"{path} holds no tensors")
    source.notes += refuse_quantised(source, config(path))
    return source


def config(path: Path) -> dict[str, Any] | None:
    """config.json of the folder (or beside the file), None if there is none.

    Raises CheckpointError if it is not a JSON object, or names model classes otherwise than in a list."""
    file = (path if path.is_dir() else path.parent) / "config.json"
    found = _json_object(file)
    names = (found or {}).get("architectures") or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise CheckpointError(
            f'{file}: "architectures" is {shortened(json.dumps(names))}, expected a list of class names',
            remedy="Save the model with transformers' save_pretrained, which writes it.",
        )
    return found


def open_clip_config(path: Path) -> dict[str, Any] | None:
    """open_clip_config.json of a folder that open_clip wrote; None for others, and where transformers' own
    files lie beside it, which are read then."""
    folder = path if path.is_dir() else path.parent
    found = _json_object(folder / "open_clip_config.json")
    if found is None or "model_type" in (config(path) or {}):
        return None
    model = found.get("model_cfg")
    lacking = [key for key in ("vision_cfg", "text_cfg") if not isinstance(model, dict) or key not in model]
    if lacking:
        raise CheckpointError(
            f'{folder / "open_clip_config.json"} has no "model_cfg" with {" and ".join(lacking)}',
            remedy="Save the model with open_clip's save_for_hf, which writes it.",
        )
    return {"model_cfg": model, "preprocess_cfg": found.get("preprocess_cfg") or {}}


def _json_object(file: Path) -> dict[str, Any] | None:
    if not file.exists():
        return None
    if not file.is_file():  # a pipe would be waited for without end
        raise CheckpointError(f"{file} is not a file", remedy="Put the model's own there, or remove it.")
    try:
        found = json.loads(file.read_bytes())
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{file} holds a {type(found).__name__}, expected an object")
    return found


def missing(path: Path) -> CheckpointError:
    """The error for a path that does not exist, with the nearest name that does."""
    refuse_dangling(path)
    deepest = next((parent for parent in path.parents if parent.is_dir()), None)
    remedy = ""
    if deepest is not None:
        wanted = path.relative_to(deepest).parts[0]
        guess = nearest(wanted, [sibling.name for sibling in deepest.iterdir() if sibling.name[:1] != "."])
        remedy = f'Did you mean "{deepest / guess}"?' if guess else f"{deepest} has nothing of that name."
    return CheckpointError(f"{path} does not exist", remedy=remedy)


def refuse_unfinished(path: Path) -> None:
    """Raises CheckpointError for a path inside a folder that is still being made."""
    for part in path.resolve().parts:
        if part.startswith(".") and ".partial-" in part:
            raise CheckpointError(
                f"{path} is what a run that did not end has left, not a finished checkpoint"
            )


def _nothing_to_read(path: Path) -> CheckpointError:
    files = [path] if path.is_file() else sorted(file for file in path.iterdir() if file.is_file())
    for file in files:
        if file.suffix.lower() == ".gguf":
            return gguf_refusal(file)
        if file.suffix.lower() in _OTHER_FORMATS:
            return CheckpointError(
                f"{file} is in a format that cannot be merged: {_OTHER_FORMATS[file.suffix.lower()]}",
                remedy="Use the checkpoint as safetensors, in float32, float16 or bfloat16.",
            )
    if path.is_file():
        return CheckpointError(
            f"{path} is not a weight file that can be read",
            remedy="Give a folder, or a .safetensors, .bin or .pt file.",
        )
    if (path / "adapter_config.json").exists():
        return CheckpointError(
            f"{path} is an adapter, not a full checkpoint",
            remedy='Name it under "adapter" instead of "model".',
        )
    return CheckpointError(
        f"{path} holds no weights: neither model.safetensors nor pytorch_model.bin, nor an index of either"
    )
