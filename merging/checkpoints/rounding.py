"""Rounding to the stored dtype, once."""

from __future__ import annotations

import torch
from torch import Tensor

from merging.errors import CheckpointError, NumericalError

_CHUNK = 1 << 22  # elements


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
    if not allow_nonfinite and not torch.isfinite(result).all():
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
    return result


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    if tensor.dtype != torch.float64 or dtype not in (torch.bfloat16, torch.float16):
        return tensor.to(dtype)
    result = torch.empty_like(tensor, dtype=dtype, memory_format=torch.contiguous_format)
    flat, source = result.view(-1), tensor.reshape(-1)
    for start in range(0, len(flat), _CHUNK):
        flat[start : start + _CHUNK] = _rounded_to_odd(source[start : start + _CHUNK]).to(dtype)
    return result


def _rounded_to_odd(wide: Tensor) -> Tensor:
    """float64 to float32 such that rounding the result again, to 16 bits, equals rounding `wide` itself.

    torch casts float64 to 16 bits through float32, which rounds twice; an inexact value whose last bit is odd
    can no longer fall on a tie.
    """
    near = wide.to(torch.float32)
    inexact = near.to(torch.float64) != wide
    even = (near.view(torch.int32) & 1) == 0
    towards = torch.where(wide > near.to(torch.float64), torch.inf, -torch.inf).to(torch.float32)
    other = torch.nextafter(near, towards)
    return torch.where(inexact & even & ~torch.isnan(wide), other, near)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
