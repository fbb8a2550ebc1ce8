"""Rounding to the stored dtype, once."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from merging.errors import CheckpointError, NumericalError

_FEW = 64
_CHUNK = 1 << 17  # elements, so that they stay in cache
_SMALLEST_NORMAL = 0x38800000  # of float16, 2^-14: its bits in float32
_INTEGERS = {  # dtype -> an integer of its size, and its exponent of ones
    torch.bfloat16: (torch.int16, 0x7F80),
    torch.float16: (torch.int16, 0x7C00),
    torch.float32: (torch.int32, 0x7F800000),
    torch.float64: (torch.int64, 0x7FF0000000000000),
}


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
    result = _cast(tensor, dtype)
    if allow_nonfinite or _all_finite(result):
        return result
    bad = int(tensor.numel() - torch.isfinite(tensor).sum())
    if bad:
        raise NumericalError(
            f'"{name}" would be written with {bad} of {tensor.numel()} values that are not finite'
        )
    largest = float(tensor.abs().max())
    raise NumericalError(
        f'"{name}" has values up to {largest:g}, more than {_short(dtype)} can hold',
        remedy='Choose a wider "dtype" for the output.',
    )


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """torch casts float64 to 16 bits through float32, which rounds twice: wrong where the first rounding
    falls on a tie of the second, so entries there take another way."""
    if tensor.dtype != torch.float64 or dtype not in (torch.bfloat16, torch.float16):
        return tensor.to(dtype)
    result = torch.empty(tensor.shape, dtype=dtype)
    flat, source = result.view(-1), tensor.cpu().reshape(-1)
    for start in range(0, len(flat), _CHUNK):
        wide = source[start : start + _CHUNK]
        near = wide.to(torch.float32)
        doubtful = _on_ties(near.numpy(), dtype)
        if len(doubtful):
            near.numpy()[doubtful] = _rounded_to_odd(wide.numpy()[doubtful])
        flat[start : start + _CHUNK] = near
    return result


def _on_ties(near: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    """Places of all float32 entries that are half way between two numbers of `dtype`, and maybe of others."""
    bits = near.view(np.int32)
    if dtype == torch.bfloat16:
        tied = (bits & 0xFFFF) == 0x8000
    else:
        magnitudes = (bits & 0x7FFFFFFF) - 1  # zero becomes the largest of all, unsigned
        tied = ((bits & 0x1FFF) == 0x1000) | (magnitudes.view(np.uint32) < _SMALLEST_NORMAL - 1)
    return _places(tied)


def _places(mask: np.ndarray) -> np.ndarray:
    """np.flatnonzero, for masks with next to nothing in them: eight entries are looked at at once."""
    whole = len(mask) // 8 * 8
    eights = np.flatnonzero(mask[:whole].view(np.int64))
    if len(eights) > _FEW:
        return np.flatnonzero(mask)
    near = [place for eight in eights.tolist() for place in range(8 * eight, 8 * eight + 8)]
    return np.array([place for place in (*near, *range(whole, len(mask))) if mask[place]], dtype=np.intp)


def _rounded_to_odd(wide: np.ndarray) -> np.ndarray:
    """float64 to float32 such that rounding the result again, to 16 bits, equals rounding `wide` itself: an
    inexact value whose last bit is odd cannot fall on a tie."""
    near = wide.astype(np.float32)
    inexact, even = near != wide, (near.view(np.int32) & 1) == 0
    towards = np.where(wide > near, np.float32(np.inf), np.float32(-np.inf))
    return np.where(inexact & even & ~np.isnan(wide), np.nextafter(near, towards), near)


def _all_finite(tensor: Tensor) -> bool:
    """Neither infinity nor NaN, whose exponents are all ones; by integers, which torch compares faster."""
    kind = _INTEGERS.get(tensor.dtype)
    if kind is None or not tensor.numel():
        return bool(torch.isfinite(tensor).all())
    integer, exponent = kind
    return int((tensor.view(integer) & torch.iinfo(integer).max).amax()) < exponent


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
