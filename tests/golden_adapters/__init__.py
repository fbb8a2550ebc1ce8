"""Adapters from the methods of the golden manifest to this package, one file per family.

An adapter takes a case (its entry in the manifest) and the tensors of its file; it returns outputs by name
and raises NotExpressible where the case cannot be said in this package's settings.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from golden_adapters import average, layerwise, task_arithmetic, ties

Adapter = Callable[[dict[str, Any], dict[str, Tensor]], dict[str, Any]]

ADAPTERS: dict[str, Adapter] = {
    "simple_average": average.simple_average,
    "linear": average.linear,
    "task_arithmetic": task_arithmetic.task_arithmetic,
    "ties": ties.ties,
    **layerwise.ADAPTERS,
}

NOT_BUILT = frozenset(
    {
        "adamerging",
        "breadcrumbs",
        "core_space",
        "dare",
        "dare_ties",
        "della",
        "fisher",
        "iso_c",
        "iso_cts",
        "karcher",
        "knots",
        "lot",
        "model_stock",
        "prob_surgery",
        "sce",
        "slerp",
        "surgery",
        "tsv_m",
        "wudi",
    }
)
"""Methods that this package does not have; their cases are listed at the end of every run."""
