"""What opening found out, remembered: the next run on the same plain full checkpoints need not ask again.

Plain means that names, shapes and dtypes of all experts are the base's. What is found then depends on
configs, tokenizers and headers alone, and the libraries that read them take longer to load than many merges.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import merging
from merging.cache import cache_folder
from merging.checkpoints.atomic import write_atomic
from merging.checkpoints.source import CheckpointSource
from merging.errors import OutputError

_LARGEST = 64 << 20  # bytes of a file beside the weights that is read
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt")


@dataclass(frozen=True)
class Findings:
    """Of one set of checkpoints: what opening them adds to what their headers say."""

    kept: tuple[str, ...]  # tensors that are never merged
    heads: Mapping[str, tuple[str, ...]]  # task -> tensors of its head
    notes: tuple[str, ...]


def key_of(
    asked: Any, base: CheckpointSource, experts: Sequence[CheckpointSource], folders: Sequence[Path]
) -> str | None:
    """Names this set of checkpoints, and the code that reads it; None where it is not plain.

    `asked`: what the spec says that matters, fit for JSON; `folders` of base and experts, in order."""
    header = [(name, base.spec(name).shape, str(base.spec(name).dtype)) for name in base.names()]
    if any(expert.names() != base.names() for expert in experts):
        return None
    if any(expert.spec(name) != base.spec(name) for expert in experts for name in base.names()):
        return None
    digest = hashlib.sha256(json.dumps([asked, header, _versions(), _code()], default=str).encode())
    for folder in folders:
        for file in sorted(folder.iterdir()) if folder.is_dir() else [folder]:
            digest.update(f"\0{file.name}\0".encode())
            if file.is_file() and file.suffix not in _WEIGHTS:
                if file.stat().st_size > _LARGEST:
                    return None
                digest.update(hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()


def recall(key: str) -> Findings | None:
    try:
        found = json.loads(_place(key).read_bytes())
        heads = {task: tuple(names) for task, names in found["heads"].items()}
        return Findings(tuple(found["kept"]), heads, tuple(found["notes"]))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None  # not known, or spoilt: found out anew


def remember(key: str, findings: Findings) -> None:
    """A cache that cannot be written is no error."""
    place = _place(key)
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(place, json.dumps(asdict(findings)))
    except (OSError, OutputError):
        return


def _place(key: str) -> Path:
    return cache_folder() / "opened" / f"{key}.json"


def _versions() -> dict[str, str]:
    return {package: version(package) for package in ("torch", "transformers", "open_clip_torch")} | {
        "merging": merging.__version__
    }


def _code() -> list[tuple[str, int, int]]:
    """Every file of this package: whoever changes the code must not get what older code found."""
    home = Path(__file__).parent
    return [
        (str(file.relative_to(home)), file.stat().st_size, file.stat().st_mtime_ns)
        for file in sorted(home.rglob("*.py"))
    ]
