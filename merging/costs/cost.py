"""Cost: what a method says of its own memory, disk and operations."""

from __future__ import annotations

from dataclasses import dataclass, field, fields


@dataclass(frozen=True)
class Work:
    """Operations, by the kind of rate at which a machine does them."""

    single: float = 0.0  # floating point operations of matrix products in float32
    double: float = 0.0  # in float64: of products, and of what is told in their time
    entries: float = 0.0  # entries taken through one operation in float64, cache-sized blocks at a time
    read: float = 0.0  # bytes of files read
    written: float = 0.0  # bytes of files written

    def __add__(self, other: Work) -> Work:
        return Work(**{one.name: getattr(self, one.name) + getattr(other, one.name) for one in fields(self)})

    def __mul__(self, times: float) -> Work:
        return Work(**{one.name: getattr(self, one.name) * times for one in fields(self)})


@dataclass(frozen=True)
class Cost:
    """Of one step of a run."""

    memory: float  # bytes at most, beside what the process holds before
    scratch: float = 0.0  # bytes on disk at most while it works, beside the result
    work: Work = field(default_factory=Work)
    device: float = 0.0  # bytes at most on the device, where that is not the CPU
