"""From what a user writes in the spec, a path or a hub id, to a folder on this machine."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from pathlib import Path

from merging.checkpoints.folder import missing
from merging.checkpoints.weight_files import find_pickled, find_safetensors
from merging.errors import CheckpointError

_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
_SIDE = [
    "*.json",
    "*.txt",
    "*.model",
    "*.jinja",
    "*.tiktoken",
    "*.spm",
    "*.vocab",
    "*.bpe",
    "LICENSE*",
    "NOTICE*",
    "README.md",  # says the licence
]
_SAFE = ["*.safetensors"]
_PICKLED = ["*.bin", "*.pt", "*.pth"]
_NEVER = [  # copies of the weights in other forms, and what training leaves
    "consolidated*",
    "original/*",
    "onnx/*",
    "openvino/*",
    "coreml/*",
    "checkpoint-*/*",
    "runs/*",
    "optimizer*",
    "scheduler*",
    "rng_state*",
    "training_args.bin",
]


@dataclass(frozen=True)
class ResolvedModel:
    """`path` is on this machine; the others are set for models of the hub, `revision` being the commit."""

    path: Path
    repo_id: str | None = None
    revision: str | None = None


def resolve(model: str, *, revision: str | None = None, folder: Path) -> ResolvedModel:
    """A path (relative ones start at `folder`) or a hub id, downloaded or found in the cache.

    Something that can only be a path is never looked for on the hub. Raises CheckpointError.
    """
    path = folder / Path(model).expanduser()
    if path.exists():
        if revision is not None:
            raise CheckpointError(f'{path} is a local path, which has no revision "{revision}"')
        return ResolvedModel(path)
    if _can_only_be_a_path(model, folder):
        raise missing(path)
    snapshot = _snapshot(model, revision, path)
    return ResolvedModel(snapshot, model, snapshot.name)


def _can_only_be_a_path(model: str, folder: Path) -> bool:
    if not _ID.fullmatch(model) or Path(model).suffix in (".safetensors", ".bin", ".pt", ".pth", ".gguf"):
        return True
    first = Path(model).parts[0]
    if "/" in model:
        return (folder / first).exists()
    siblings = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    return bool(difflib.get_close_matches(model, siblings, n=1, cutoff=0.8))


def _snapshot(repo_id: str, revision: str | None, path: Path) -> Path:
    found = _download(repo_id, revision, path, [*_SIDE, *_SAFE])
    if find_safetensors(found) is None and not (found / "adapter_model.safetensors").is_file():
        found = _download(repo_id, revision, path, [*_SIDE, *_PICKLED])
    return found


def _download(repo_id: str, revision: str | None, path: Path, patterns: list[str]) -> Path:
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    at = f' at revision "{revision}"' if revision is not None else ""
    try:
        return Path(
            snapshot_download(
                repo_id,
                revision=revision,
                allow_patterns=patterns,
                ignore_patterns=_NEVER,
                local_files_only=constants.HF_HUB_OFFLINE,  # before 2.0 a commit is asked for
            )
        )
    except GatedRepoError as error:
        raise CheckpointError(
            f'"{repo_id}" is gated: its owner decides who may download it',
            remedy=f'Ask for access at {constants.ENDPOINT}/{repo_id}, then log in with "hf auth login".',
        ) from error
    except RevisionNotFoundError as error:
        raise CheckpointError(f'"{repo_id}" has no revision "{revision or "main"}" on the hub') from error
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise CheckpointError(
            f'"{repo_id}" is neither a path ({path} does not exist) nor a model on the hub',
            remedy='If it is private, log in with "hf auth login".',
        ) from error
    except LocalEntryNotFoundError as error:
        partial = getattr(error, "snapshot_path", None)
        if partial is not None and _is_usable(Path(partial)):
            return Path(partial)
        reason = "is only in part" if partial is not None else "is not"
        if constants.HF_HUB_OFFLINE:
            what, remedy = (
                "the hub is switched off (HF_HUB_OFFLINE)",
                "Download it first, with HF_HUB_OFFLINE unset.",
            )
        else:
            what, remedy = "the hub cannot be reached", "Try again with a connection, or give a local path."
        raise CheckpointError(
            f'"{repo_id}"{at} {reason} in the cache ({constants.HF_HUB_CACHE}), and {what}; '
            f"{path} does not exist either",
            remedy=remedy,
        ) from error
    except (HfHubHTTPError, OSError) as error:
        first = str(error).strip().split("\n")[0] or type(error).__name__
        raise CheckpointError(f'"{repo_id}"{at} cannot be downloaded: {first}') from error


def _is_usable(snapshot: Path) -> bool:
    """Whether a snapshot of which other programs took only some files has what a merge needs."""
    if (snapshot / "adapter_config.json").is_file():
        return any((snapshot / f"adapter_model.{ending}").is_file() for ending in ("safetensors", "bin"))
    try:
        weights = find_safetensors(snapshot) or find_pickled(snapshot)
    except CheckpointError:
        return False
    configs = (snapshot / name for name in ("config.json", "open_clip_config.json"))
    return weights is not None and any(map(Path.exists, configs)) and all(map(Path.exists, weights.files))
