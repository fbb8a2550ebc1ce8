"""Rounding to the stored dtype, once."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import torch
from torch import Tensor

from merging import native
from merging.checkpoints.scratch import Scratch
from merging.errors import CheckpointError, NumericalError

_CHUNK = 1 << 15  # elements, so that they stay in cache
_DROPPED = np.int64((1 << 29) - 1)  # bits of a float64's fraction that a float32 lacks
_SUBNORMAL = 0x80  # bits of bfloat16's smallest normal number, to which subnormal ones may round
_INTEGERS = {
    torch.bfloat16: torch.int16,
    torch.float16: torch.int16,
    torch.float32: torch.int32,
    torch.float64: torch.int64,
}
_ONES: dict[torch.dtype, int] = defaultdict(lambda: 1)  # dtype -> bits of infinity, an exponent of ones
_ONES |= {
    torch.bfloat16: 0x7F80,
    torch.float16: 0x7C00,
    torch.float32: 0x7F800000,
    torch.float64: 0x7FF0000000000000,
}
_ODD = Scratch()


def rounded(tensor: Tensor, dtype: torch.dtype, *, name: str, allow_nonfinite: bool = False) -> Tensor:
    """`tensor` in `dtype`, correctly rounded to nearest even, whatever it was computed in.

    Integers and bools must come as they are stored. Raises NumericalError, naming the tensor, for a value
    that is not finite or that `dtype` cannot hold.
    """
    if not dtype.is_floating_point and not dtype.is_complex:
        if tensor.dtype != dtype:
            raise CheckpointError(
                f'"{name}" is stored as {_short(dtype)} and must not be written as {_short(tensor.dtype)}'
            )
        return tensor
    if dtype == torch.bfloat16 and tensor.numel() and native.stacked(tensor[None]):
        result, largest = native.to_bfloat16(tensor)
    else:
        result = _cast(tensor, dtype)
        smallest, largest = (1, 0) if allow_nonfinite and dtype not in _INTEGERS else _extremes(result)
        if smallest <= _SUBNORMAL and dtype == torch.bfloat16 and tensor.dtype == torch.float64:
            _mend_subnormal_(result, tensor)
    if allow_nonfinite or largest < _ONES[dtype]:
        return result
    bad = int(tensor.numel() - torch.isfinite(tensor).sum())
    if bad:
        raise NumericalError(
            f'"{name}" would be written with {bad} of {tensor.numel()} values that are not finite',
            remedy="The inputs hold NaN, infinity or very large values, or have weights that are too large: "
            "check the experts' files (with the alpha of an adapter) and the rule's settings.",
        )
    raise NumericalError(
        f'"{name}" has values up to {float(tensor.abs().max()):g}, more than {_short(dtype)} can hold',
        remedy='Choose a wider "dtype" for the output.',
    )


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """torch casts float64 to 16 bits through float32, which rounds twice: wrong where the first rounding
    falls on a tie of the second. So float64 is first rounded to odd: of the two float32 neighbours of an
    inexact value, that whose last bit is 1 is taken, after which no tie is left. Right for all but float32's
    subnormal numbers."""
    if tensor.dtype != torch.float64 or dtype not in (torch.bfloat16, torch.float16):
        return tensor.to(dtype)
    result = torch.empty(tensor.shape, dtype=dtype)
    flat, bits = result.view(-1), tensor.cpu().reshape(-1).numpy().view(np.int64)
    odd = _ODD.bytes(8 * min(_CHUNK, len(bits))).view(torch.float64)
    found = odd.numpy().view(np.int64)
    for start in range(0, len(bits), _CHUNK):
        part = bits[start : start + _CHUNK]
        found = found[: len(part)]
        np.bitwise_and(part, _DROPPED, out=found)
        np.add(found, _DROPPED, out=found)  # carries into the last bit that is kept, if any was set
        np.bitwise_or(found, part, out=found)
        np.bitwise_and(found, ~_DROPPED, out=found)
        flat[start : start + _CHUNK] = odd[: len(part)]
    return result


def _mend_subnormal_(result: Tensor, tensor: Tensor) -> None:
    """Cast float64 to bfloat16 anew where that gave subnormal numbers."""
    all_values = tensor.cpu().reshape(-1).numpy()
    small = (result.view(-1).view(torch.int16).numpy() & 0x7FFF) <= _SUBNORMAL
    places = np.flatnonzero(small & (all_values != 0))
    values = all_values[places]
    near = values.astype(np.float32)
    inexact, even = near != values, (near.view(np.int32) & 1) == 0
    towards = np.where(values > near, np.float32(np.inf), np.float32(-np.inf))
    odd = np.where(inexact & even, np.nextafter(near, towards), near)
    result.view(-1)[torch.from_numpy(places)] = torch.from_numpy(odd).to(torch.bfloat16)


def _extremes(tensor: Tensor) -> tuple[int, int]:
    """The smallest and the largest magnitude, as bits; by integers, which torch compares faster."""
    integer = _INTEGERS.get(tensor.dtype)
    if integer is None:
        return 1, int(not torch.isfinite(tensor).all())
    if not tensor.numel():
        return 1, 0
    smallest, largest = (tensor.view(integer) & torch.iinfo(integer).max).aminmax()
    return int(smallest), int(largest)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
