"""Limits: how much of the machine a method may use at a time; if nothing is said, its own defaults hold."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """Results do not depend on these, but for the order of sums."""

    row_block: int | None = None  # entries of a row block, per model
    threads: int | None = None  # that walk over parameters at once
    activation_memory: int | None = None  # bytes of activations that wait in memory; the rest is on disk


USUAL = Limits()
