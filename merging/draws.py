"""Random numbers with an address: the same wherever, whenever and in whatever pieces they are drawn."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

_WORDS = 8  # 32-bit words that one step of the counter gives


def uniforms(shape: Sequence[int], offset: int, *address: object) -> Tensor:
    """Float64 numbers in (0, 1): entries `offset` onwards of the endless sequence of this address.

    A counter-based generator (Philox) keyed by a hash of the address, so that a block of rows gets the
    numbers which it has in the whole tensor.
    """
    count = torch.Size(shape).numel()
    digest = hashlib.blake2b("\0".join(map(str, address)).encode(), digest_size=16).digest()
    step, skip = divmod(offset, _WORDS)
    generator = np.random.Philox(key=np.frombuffer(digest, dtype="<u8").astype(np.uint64), counter=step)
    raw = generator.random_raw((skip + count + 1) // 2)
    words = raw.astype("<u8").view("<u4")[skip : skip + count]
    return torch.from_numpy((words + 0.5) / 2.0**32).view(tuple(shape))
