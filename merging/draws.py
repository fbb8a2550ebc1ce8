"""Random numbers with an address: the same wherever, whenever and in whatever pieces they are drawn."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


def uniforms(shape: Sequence[int], offset: int, *address: object) -> Tensor:
    """Float64 numbers in (0, 1): entries `offset` onwards of the endless sequence of this address.

    A generator that can be advanced (PCG64DXSM), seeded by a hash of the address, so that a block of rows
    gets the numbers which it has in the whole tensor.
    """
    words = _words(torch.Size(shape).numel(), offset, *address)
    return torch.from_numpy((words + 0.5) / 2.0**32).view(tuple(shape))


def below(probability: float, shape: Sequence[int], offset: int, *address: object) -> Tensor:
    """Mask: uniforms(...) < probability, by comparing integers."""
    words = _words(torch.Size(shape).numel(), offset, *address)
    first_above = math.ceil(probability * 2.0**32 - 0.5)
    mask = words < np.uint32(first_above) if first_above < 2**32 else np.ones(len(words), dtype=np.bool_)
    return torch.from_numpy(mask).view(tuple(shape))


def _words(count: int, offset: int, *address: object) -> np.ndarray:
    """32-bit words, two of each 64-bit number of the generator, the lower half first."""
    digest = hashlib.blake2b("\0".join(map(str, address)).encode(), digest_size=16).digest()
    step, skip = divmod(offset, 2)
    bits = np.random.PCG64DXSM(int.from_bytes(digest, "little"))
    bits.advance(step)
    # the same numbers as bits.random_raw(), which would keep other threads waiting
    raw = np.random.Generator(bits).integers(
        0, 2**64 - 1, size=(skip + count + 1) // 2, dtype=np.uint64, endpoint=True
    )
    return raw.astype("<u8", copy=False).view("<u4")[skip : skip + count]
