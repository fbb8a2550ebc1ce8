"""Hashes of examples: by what the model sees, so that the same example is known again in another file."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

    from merging.contracts.backbone import Batch
    from merging.data.task import Examples, Task

_BESIDE = ("attention_mask", "position_ids", "token_type_ids")  # follow from the inputs that they go with


def example_hashes(batch: Batch) -> Iterator[str]:
    """One hash per example of the batch: names, dtypes, shapes and values of its inputs."""
    names = sorted(batch)
    for position in range(len(batch[names[0]])):
        digest = hashlib.sha256()
        for name in names:
            value = batch[name][position]
            digest.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
            digest.update(_bytes(value))
        yield digest.hexdigest()


def seen_hashes(batch: Batch) -> Iterator[str]:
    """One hash per example of what it shows the model, alike in every type of source: tokens without their
    padding, all else as numbers in float32. What a decoder is given is an answer, and does not count."""
    own = [name for name in sorted(batch) if not name.startswith("decoder_") and name not in _BESIDE]
    names, mask_BT = own or sorted(batch), batch.get("attention_mask")
    for position in range(len(batch[names[0]])):
        digest = hashlib.sha256()
        for name in names:
            value = batch[name][position]
            if name == "input_ids" and value.ndim == 1 and not value.is_floating_point():
                if mask_BT is not None and mask_BT.shape == batch[name].shape:
                    value = value[mask_BT[position] != 0]
                digest.update(_tokens(name, value.tolist()))
                continue
            value = value.float()
            digest.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
            digest.update(_bytes(value))
        yield digest.hexdigest()


def tokens_hash(name: str, ids: Sequence[int]) -> str:
    """That of an example which is nothing but these tokens."""
    return hashlib.sha256(_tokens(name, ids)).hexdigest()


def fingerprint(hashes: Sequence[str], labels: Tensor | None) -> str:
    """One hash of all examples, their labels and their order."""
    digest = hashlib.sha256("\n".join(hashes).encode())
    if labels is not None:
        digest.update(f"\nlabels {tuple(labels.shape)}\n".encode())
        digest.update(_bytes(labels.long()))
    return digest.hexdigest()


def tensors_hash(tensors: Iterable[Tensor]) -> str:
    """One hash of dtypes, shapes and values."""
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(f"{tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(_bytes(tensor))
    return digest.hexdigest()


def overlap(calibration: Examples, test: Examples) -> int:
    """How many test examples have the same inputs as some calibration example."""
    known = frozenset(calibration.hashes())
    return sum(one in known for one in test.hashes())


class Shared(NamedTuple):
    """So many test examples of a task are calibration examples, of these tasks."""

    examples: int
    tasks: tuple[str, ...]


def shared_examples(tasks: Mapping[str, Task]) -> dict[str, Shared]:
    """Task -> its test examples that are calibration examples too, of any task; only where there are some."""
    owners: dict[str, list[str]] = {}
    for name, task in tasks.items():
        for one in dict.fromkeys(task.calibration.hashes() if task.calibration is not None else ()):
            owners.setdefault(one, []).append(name)
    found = {}
    for name, task in tasks.items():
        met = [owners[one] for one in (task.test.hashes() if task.test is not None else ()) if one in owners]
        if met:
            others = {owner for several in met for owner in several}
            found[name] = Shared(len(met), tuple(owner for owner in tasks if owner in others))
    return found


def _tokens(name: str, ids: Sequence[int]) -> bytes:
    return f"{name} {list(ids)}".encode()


def _bytes(value: Tensor) -> bytes:
    import torch

    return value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
