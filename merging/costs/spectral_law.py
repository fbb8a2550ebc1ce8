"""The law of what is computed by singular triplets; see `spectral.py`.

A matrix has `longer` by `shorter` entries; everything is in float64.
"""

from __future__ import annotations

from merging.costs.cost import Work

_EIGH = 11.0  # operations over n³, in units of a product's time


def triplets(longer: int, shorter: int, kept: int) -> Work:
    """Half a Gram on the shorter side, its eigenvectors, and the product that gives the other side's."""
    return Work(double=1.0 * longer * shorter**2 + _EIGH * shorter**3 + 2.0 * longer * shorter * kept)


def decorrelation(longer: int, shorter: int) -> Work:
    """Inverse roots of both sides' Grams, and the product of all."""
    grams = longer * shorter**2 + shorter**3
    return Work(double=grams + (2 * _EIGH + 6.0) * shorter**3 + 4.0 * longer * shorter**2)


def held_by_triplets(longer: int, shorter: int) -> list[int]:
    """A Gram, its eigenvectors and LAPACK's workspace of two more."""
    return [8 * shorter * shorter] * 4


def held_by_decorrelation(longer: int, shorter: int) -> list[int]:
    """Vectors of both sides, task by task and together; roots; the product and its half."""
    sides = [8 * longer * shorter, 8 * shorter * shorter] * 2
    return [*sides, *held_by_triplets(longer, shorter), *[8 * longer * shorter] * 2]
