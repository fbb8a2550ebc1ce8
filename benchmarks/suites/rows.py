"""The rows of the results table: every merge rule, and what the search on validation examples tries."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

CALIBRATORS = ("featcal", "surgery", "prob_surgery")
SCALES = (0.3, 0.6, 1.0)
PARTS = {"chain": "none", "normalise": "none", "task_weights": False}
"""Chain of Merges without its three parts."""


@dataclass(frozen=True)
class Row:
    """A rule with settings; `sweep` has the values that the search tries, by setting."""

    label: str
    rule: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    sweep: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    calibrators: Sequence[str] = CALIBRATORS
    adapters_only: bool = False
    needs_heads: bool = False


RULES = (
    Row("average", "average"),
    Row("Task Arithmetic", "task_arithmetic", sweep={"scale": (0.05, 0.1, 0.2, 0.3)}),
    Row("TIES", "ties", sweep={"scale": SCALES}),
    Row("RegMean", "regmean", sweep={"shrink": (0.9, 0.99)}),
    Row("RegMean++", "regmean_plus_plus", sweep={"shrink": (0.95, 0.99)}),
    Row("Chain of Merges", "chain_of_merges", sweep={"shrink": (0.95, 0.99)}),
    Row("DARE", "dare", sweep={"scale": (0.05, 0.1, 0.2)}),
    Row("DARE-TIES", "dare_ties", sweep={"scale": SCALES}),
    Row("DELLA", "della", sweep={"scale": SCALES}),
    Row("Breadcrumbs", "breadcrumbs", sweep={"scale": (0.05, 0.1, 0.2, 0.3)}),
    Row("SCE", "sce", sweep={"scale": SCALES}),
    Row("Karcher mean", "karcher"),
    Row("Model Stock", "model_stock"),
    Row("TSV-M", "tsv_m", sweep={"scale": SCALES}),
    Row("Iso-C", "iso_c", sweep={"scale": SCALES}),
    Row("Iso-CTS", "iso_cts", sweep={"scale": SCALES}),
    Row("WUDI", "wudi", sweep={"scale": SCALES}),
    Row("LOT", "lot", sweep={"scale": (0.3, 1.0)}),
    Row("KnOTS", "knots", sweep={"scale": SCALES}, adapters_only=True),
    Row("Core Space", "core_space", sweep={"scale": (0.1, 0.2, 0.4)}, adapters_only=True),
    Row("Fisher", "fisher", {"estimate": "batch"}, needs_heads=True),
    Row("AdaMerging", "ada_merging", {"steps": 30, "batches": 1, "initial": 0.1}, needs_heads=True),
)

ABLATION = (
    Row("without its three parts", "chain_of_merges", PARTS, calibrators=()),
    Row("chain", "chain_of_merges", {**PARTS, "chain": "feed"}, calibrators=()),
    Row("chain, normalisation", "chain_of_merges", {"task_weights": False}, calibrators=()),
    Row("chain, normalisation, weights", "chain_of_merges", calibrators=()),
)
"""Chain of Merges, part after part, as its authors add them."""
