"""Hashes of examples: by what the model sees, so that the same example is known again in another file."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from merging.contracts.backbone import Batch
    from merging.data.task import Examples


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


def _bytes(value: Tensor) -> bytes:
    import torch

    return value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
