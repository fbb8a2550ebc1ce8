"""Adapters from the methods of the golden manifest to this package, one file per family.

An adapter takes a case (its entry in the manifest) and the tensors of its file; it returns outputs by name
and raises NotExpressible where the case cannot be said in this package's settings.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from golden_adapters import (
    ada_merging,
    average,
    fisher,
    layerwise,
    lora,
    lot,
    prob_surgery,
    sparse,
    spectral,
    spherical,
    surgery,
    task_arithmetic,
    ties,
)

Adapter = Callable[[dict[str, Any], dict[str, Tensor]], dict[str, Any]]

ADAPTERS: dict[str, Adapter] = {
    "simple_average": average.simple_average,
    "linear": average.linear,
    "task_arithmetic": task_arithmetic.task_arithmetic,
    "ties": ties.ties,
    "dare": sparse.dare,
    "dare_ties": sparse.dare_ties,
    "della": sparse.della,
    "breadcrumbs": sparse.breadcrumbs,
    "sce": sparse.sce,
    "slerp": spherical.slerp,
    "karcher": spherical.karcher,
    "model_stock": spherical.model_stock,
    **layerwise.ADAPTERS,
    **lot.ADAPTERS,
    **spectral.ADAPTERS,
    **surgery.ADAPTERS,
    **prob_surgery.ADAPTERS,
    **fisher.ADAPTERS,
    **ada_merging.ADAPTERS,
    **lora.ADAPTERS,
}

NOT_BUILT = frozenset({})
"""Methods that this package does not have; their cases are listed at the end of every run."""
