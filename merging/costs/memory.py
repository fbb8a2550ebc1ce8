"""Resident memory of arrays that come and go: what is alive, and what the allocator keeps of what was."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

_LARGE = 32 << 20  # bytes; the C library gives larger arrays back as soon as they are freed
_SPREAD = 1.6  # resident over alive, of smaller ones: what lies between them is not given back
WORKSPACE = 48 << 20  # bytes that the BLAS keeps for its own copies


@dataclass(frozen=True)
class Alive:
    """Bytes of arrays that are alive at one moment: of small ones and of large ones."""

    small: float = 0.0
    large: float = 0.0

    @classmethod
    def of(cls, *arrays: float) -> Alive:
        small = sum(size for size in arrays if size < _LARGE)
        return cls(small, sum(arrays) - small)

    def __add__(self, other: Alive) -> Alive:
        return Alive(self.small + other.small, self.large + other.large)


def resident(moments: Iterable[Alive]) -> float:
    """The peak over all moments: small arrays take what they took at their worst, at any later moment too."""
    moments = list(moments)
    small = max((one.small for one in moments), default=0.0)
    return _SPREAD * small + max((one.large for one in moments), default=0.0)


def together(parts: Iterable[Alive]) -> Alive:
    return sum(parts, Alive())
