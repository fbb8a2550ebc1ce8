"""refuse_unless_finite: NaN and infinity in what was read, told before a rule can hide them."""

from __future__ import annotations

import torch
from torch import Tensor

from merging.errors import NumericalError


def refuse_unless_finite(tensor: Tensor, *, label: str, name: str) -> None:
    """Raise NumericalError that names model, tensor and how many values are NaN or infinite.

    For rules whose entries depend on each other: a decomposition may turn one such value into zeros or fail
    from deep inside. Entry by entry it stays where it is, and the sink finds it.
    """
    if not tensor.dtype.is_floating_point or bool(torch.isfinite(tensor.sum())):
        return
    bad = int((~torch.isfinite(tensor)).sum())
    if bad:  # else the sum alone was too large
        raise NumericalError(
            f'{label}: "{name}" has {bad} of {tensor.numel()} values that are NaN or infinite',
            remedy="Leave this model out, or get it again.",
        )
