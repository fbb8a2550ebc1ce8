"""What calibrators that correct final features share: the batches, the training loop, and their files.

Shape letters: B examples of a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from urllib.parse import quote

import torch
from torch import Tensor

from merging.data.draw import generator
from merging.data.tensor_file import open_tensor_file
from merging.errors import DataError


def drawn_batches(
    examples: int, *, iterations: int, batches: int, batch_size: int, seed: int, task: str
) -> Iterator[Tensor]:
    """Row numbers (B) of each step: in each iteration the first `batches` batches of a new permutation."""
    random = generator(seed, task, "surgery batches")
    for _ in range(iterations):
        yield from torch.randperm(examples, generator=random).split(batch_size)[:batches]


def descend(
    parameters: list[Tensor],
    loss_of: Callable[[Tensor], Tensor],
    *,
    batches: Iterable[Tensor],
    learning_rate: float,
) -> float | None:
    """Adam on `parameters` (leaves, changed in place), one step per batch of row numbers (B).

    The loss of the last step, before its update; None without a step.
    """
    adam = torch.optim.Adam(parameters, lr=learning_rate)
    loss: Tensor | None = None
    with torch.enable_grad():
        for rows_B in batches:
            loss = loss_of(rows_B)
            adam.zero_grad()
            loss.backward()
            adam.step()
    return None if loss is None else loss.item()


def leaf(tensor: Tensor) -> Tensor:
    """A copy that training may change."""
    return tensor.detach().clone().requires_grad_()


def save_module(tensors: Mapping[str, Tensor], task: str, folder: Path, suffix: str) -> Path:
    """Write `<task><suffix>`, with the task's own name inside."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{quote(task, safe=' ')}{suffix}"
    save_file(dict(tensors), path, metadata={"task": task})
    return path


def load_modules(folder: Path, suffix: str, method: str) -> dict[str, tuple[Path, dict[str, Tensor]]]:
    """Task -> file and tensors, of all that `save_module` wrote there. Raises DataError if there are none."""
    paths = sorted(folder.glob(f"*{suffix}"))
    if not paths:
        raise DataError(f"{method}: no *{suffix} in {folder}")
    modules = {}
    for path in paths:
        with open_tensor_file(path, method) as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            task = (file.metadata() or {}).get("task", path.name.removesuffix(suffix))
        modules[task] = (path, tensors)
    return modules


def refuse_module(method: str, path: Path, tensors: Mapping[str, Tensor], expected: str) -> DataError:
    """The error for a file whose tensors are not those of the method's module."""
    found = ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in tensors.items())
    return DataError(f"{method}: {path} has {found}; expected {expected}")
