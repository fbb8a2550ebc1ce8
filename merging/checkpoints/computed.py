"""computed: parameters that a model class makes itself and does not store, such as Marian's positions."""

from __future__ import annotations

import re
from collections.abc import Iterable

import torch
from torch import Tensor, nn


def computed_weights(model: nn.Module, names: Iterable[str]) -> dict[str, Tensor]:
    """Those of `names` that transformers says are not in checkpoints, as the class makes them anew each time.

    What it would draw at random is left out: that is a weight which is missing."""
    unstored = set(getattr(model, "_keys_to_ignore_on_save", None) or ())
    patterns = tuple(getattr(model, "_keys_to_ignore_on_load_missing", None) or ())
    found = {}
    for name in names:
        if name not in unstored and not any(re.search(pattern, name) for pattern in patterns):
            continue
        one, again = (_made(model, name, seed) for seed in (0, 1))
        if one is not None and again is not None and torch.equal(one, again):  # NaN equals nothing
            found[name] = one
    return found


def _made(model: nn.Module, name: str, seed: int) -> Tensor | None:
    """What the class puts into a parameter of a new model; None if it cannot be asked."""
    path, _, leaf = name.rpartition(".")
    owner = model.get_submodule(path)
    init = getattr(model, "_init_weights", None)
    if init is None:
        return None
    before = dict(owner._parameters)
    try:
        for other, parameter in before.items():
            if parameter is not None:
                empty = torch.full(parameter.shape, torch.nan, dtype=parameter.dtype)
                owner._parameters[other] = nn.Parameter(empty, requires_grad=False)
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(seed)
            init(owner)
        made = owner._parameters[leaf]
        return None if made is None else made.detach()
    finally:
        owner._parameters.update(before)
