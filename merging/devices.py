"""choose_device: where a run computes, and short words for why it cannot be there."""

from __future__ import annotations

import re

import torch

from merging.errors import SpecError
from merging.registry import did_you_mean
from merging.spec.pipeline_spec import DEVICES

_LONGEST = 100  # characters of torch's own words
_CUDA = re.compile(r"cuda(?::(\d+))?")


def choose_device(name: str) -> str:
    """`auto` is a GPU where there is one. Raises SpecError for a device that this machine does not have."""
    kind = name.partition(":")[0]
    if kind not in DEVICES:
        raise SpecError(
            f'device "{name}" cannot be used here: there is no such kind', remedy=did_you_mean(kind, DEVICES)
        )
    if name == "auto":
        if torch.cuda.is_available():
            return "cuda"
        return "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:
        raise SpecError(
            f'device "{name}" cannot be used here: {_reason(name, error)}',
            remedy='Use "cpu", or "auto" for whatever there is.',
        ) from error
    return name


def _reason(name: str, error: BaseException) -> str:
    """Drivers explain at length what is seldom to the point; else the first sentence of what torch says."""
    asked = _CUDA.fullmatch(name)
    if asked is not None and not torch.backends.cuda.is_built():
        return "this torch is built without CUDA"
    if asked is not None and not torch.cuda.is_available():
        return "there is no NVIDIA GPU, or no driver for it"
    count = torch.cuda.device_count()
    if asked is not None and asked[1] is not None and int(asked[1]) >= count:
        return f"there {'is' if count == 1 else 'are'} {', '.join(f'cuda:{at}' for at in range(count))}"
    told = (str(error).strip() or type(error).__name__).splitlines()[0].split(". ")[0]
    return told if len(told) <= _LONGEST else f"{told[: _LONGEST - 3]}..."
