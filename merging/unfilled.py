"""unfilled: parameters of a model class that a checkpoint does not fill, and transformers would draw."""

from __future__ import annotations

import re
from collections.abc import Container

from torch import nn

from merging.checkpoints.computed import computed_weights
from merging.checkpoints.names import NameMap


def unfilled(model: nn.Module, names: NameMap, parts: Container[str] = ()) -> tuple[str, ...]:
    """Their names in `model`. `names`: of the checkpoint's tensors in it; `parts`: names in it of weights
    that lie several to a tensor.

    Tied ones count once, by whatever of them is stored. What the class computes itself, and what it says may
    be missing, does not count."""
    patterns = tuple(getattr(model, "_keys_to_ignore_on_load_missing", None) or ())
    parameters = dict(model.named_parameters(remove_duplicate=False))
    missing = [name for name in names.missing if name in parameters and name not in parts]
    lost = [name for name in missing if not any(re.search(pattern, name) for pattern in patterns)]
    made = computed_weights(model, lost) if lost else {}
    return tuple(name for name in lost if name not in made)
