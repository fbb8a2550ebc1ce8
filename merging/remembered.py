"""What opening found out, remembered: the next run on the same plain checkpoints need not ask again.

Plain means that names, shapes and dtypes of all experts are the base's; adapters change those tensors
only. What is found then depends on configs, tokenizers and headers alone, and the libraries that read them
take longer to load than many merges.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import merging
from merging.cache import cache_folder
from merging.checkpoints.atomic import write_atomic
from merging.checkpoints.lora_places import Change, Placement
from merging.checkpoints.outline import Outline
from merging.checkpoints.source import CheckpointSource
from merging.errors import OutputError, Problem
from merging.preflight import Finding

_LARGEST = 64 << 20  # bytes of a file beside the weights that is read
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt")


@dataclass(frozen=True)
class Findings:
    """Of one set of checkpoints: what opening them adds to what their headers say."""

    kept: tuple[str, ...]  # tensors that are never merged
    heads: Mapping[str, tuple[str, ...]]  # task -> tensors of its head
    notes: tuple[str, ...]
    placements: Mapping[str, Placement] = field(default_factory=dict)  # of experts that are adapters
    outline: Outline | None = None  # of the base, where results are adapters
    findings: tuple[Finding, ...] = ()  # of configs and processors


def key_of(
    asked: Any,
    base: CheckpointSource,
    experts: Sequence[CheckpointSource],
    folders: Sequence[Path],
    *,
    adapters: Sequence[CheckpointSource] = (),
) -> str | None:
    """Names this set of checkpoints, and the code that reads it; None where it is not plain.

    `asked`: what the spec says that matters, fit for JSON; `folders` of base and all experts, in order;
    `adapters`: the files of those experts that are adapters, which are not among `experts`."""
    header = [_header(base), *map(_header, adapters)]
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
        placements = {task: _placement(*values) for task, values in found["placements"].items()}
        outline = None if found["outline"] is None else Outline(**found["outline"])
        findings = tuple(Finding(name, Problem(*what), stops) for name, what, stops in found["findings"])
        notes = tuple(found["notes"])
        return Findings(tuple(found["kept"]), heads, notes, placements, outline, findings)
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


def _placement(changes: Mapping[str, Any], whole: Mapping[str, str], notes: Sequence[str]) -> Placement:
    return Placement({name: Change(**change) for name, change in changes.items()}, whole, tuple(notes))


def _header(source: CheckpointSource) -> list[Any]:
    return [(name, source.spec(name).shape, str(source.spec(name).dtype)) for name in source.names()]


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
