"""Numbers in settings have bounds that hold what is published, and no nonsense."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from pydantic import TypeAdapter
from tiny_models import expert_of, made, opened, pixels, same_data

import merging
from merging.calibrators.featcal import FeatCal
from merging.checkpoints.sink import StateDictSink
from merging.checkpoints.source import StateDictSource
from merging.components import calibrators, strategies
from merging.errors import SpecError
from merging.spec.findings import Findings
from merging.strategies.chain_of_merges import ChainOfMerges
from merging.strategies.lot import Lot
from merging.strategies.regmean import RegMean
from merging.sweep import _steadier

PUBLISHED: dict[str, list[dict[str, Any]]] = {
    "task_arithmetic": [{"scale": scale} for scale in (-1, 0, 0.3, 0.4, 1, 3)],
    "ties": [{"scale": 0.3, "density": 0.2}, {"density": 1}],
    "dare": [{"density": density} for density in (0.01, 0.9)],
    "della": [{"epsilon": 0.15}],
    "breadcrumbs": [{"gamma": 0.01, "density": 0.9}],
    "wudi": [{"steps": 300, "learning_rate": 1e-5}, {"steps": 0}],
    "knots": [{"floor": floor} for floor in (0, 1e-5, 1e-4)],
    "karcher": [{"iterations": 10, "tolerance": 1e-5}],
    "fisher": [{"floor": 1e-6}],
    "tsv_m": [{"scale": scale} for scale in (0, 1, 3)],
    "iso_c": [{"scale": 3}],
    "iso_cts": [{"common": 0.8}],
    "chain_of_merges": [{"shrink": 0.95}, {"ridge": 0.95}],
    "regmean": [{"shrink": shrink} for shrink in (0.1, 0.6, 0.9, 0.95, 1)],
    "ada_merging": [{"initial": 0.3, "steps": 500, "learning_rate": 1e-3}],
    "featcal": [
        {"ridge": 0.05, "interpolation": 0.25, "anchor": 2.2},
        {"ridge": 0.05, "interpolation": 0.6, "anchor": 2.0},
        {"ridge": 0, "anchor": 0},
        {"ridge": 1000, "anchor": 3.5},
    ],
    "surgery": [{"rank": rank, "iterations": 1000, "learning_rate": 1e-3} for rank in (4, 16, 64)],
    "prob_surgery": [{"hidden": 128, "divergence": 1e-4}],
}


def methods() -> Iterator[tuple[str, Any]]:
    for registry in (strategies, calibrators):
        for name in registry.names():
            if registry.get(name).__module__.startswith("merging."):
                yield name, registry.get(name)


def numbers() -> list[tuple[str, str, Any]]:
    """Every setting of every method that is a number, and its field."""
    return [
        (name, key, field)
        for name, method in methods()
        for key, field in method.Settings.model_fields.items()
        if any(kind in str(field.annotation) for kind in ("int", "float"))
    ]


def taken(name: str, settings: dict[str, Any]) -> bool:
    method = dict(methods())[name]
    findings = Findings()
    findings.read(method.Settings, settings, "merge")
    return not findings.problems()


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_values_and_ranges_are_taken(name: str) -> None:
    for settings in PUBLISHED[name]:
        assert taken(name, settings), settings


@pytest.mark.parametrize(("name", "key"), [(name, key) for name, key, _ in numbers()])
def test_every_number_has_two_ends_and_is_finite(name: str, key: str) -> None:
    found = [value for value in (1e300, -1e300, 10**40, -(10**40)) if taken(name, {key: value})]
    method = dict(methods())[name]

    assert found == []
    for value in (math.nan, math.inf, -math.inf):
        with pytest.raises(SpecError):
            method(**{key: value})


def test_there_are_numbers_to_look_at() -> None:
    found = {f"{name}.{key}" for name, key, _ in numbers()}

    assert {"featcal.ridge", "featcal.anchor", "tsv_m.scale", "ada_merging.patience"} < found
    assert TypeAdapter(merging.Settings)  # what plug-ins derive theirs from


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"ridge": 1e300}, "ridge: found the number 1e+300, expected at most 1e+06"),
        ({"anchor": -3}, "anchor: found the number -3, expected at least 0"),
        ({"anchor": 40.0}, "anchor: found the number 40.0, expected at most 10"),
    ],
)
def test_nonsense_for_featcal_is_refused_with_the_bound(settings: dict[str, float], words: str) -> None:
    with pytest.raises(SpecError) as caught:
        FeatCal(**settings)

    assert words in str(caught.value)


def test_the_largest_ridge_gives_the_anchor() -> None:
    backbone, base, _ = made("vit")
    expert, start = expert_of(base, 1), expert_of(base, 2)
    models, sink = opened(base, {"a": expert}, backbone), StateDictSink(StateDictSource(base.state_dict()))

    with sink:
        rule = FeatCal(ridge=1e6, anchor=1.0)
        rule.calibrate(StateDictSource(start), models, same_data(models.experts, pixels(8)), sink)

    assert all(torch.allclose(sink.tensors[name], start[name], atol=1e-4) for name in start)


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        (FeatCal(), 'Raise "ridge", which is 0.05'),
        (FeatCal(ridge=1e6), "are too large"),
        (ChainOfMerges(), 'Raise "ridge", which is 0'),
        (ChainOfMerges(ridge=1e12), 'Lower "shrink", which is 0.95'),
        (RegMean(shrink=1.0), 'Lower "shrink", which is 1'),
        (RegMean(shrink=0), "are too large"),
        (Lot(), "are too large"),
    ],
)
def test_advice_for_a_solve_that_overflows_names_a_setting_that_helps(rule: Any, words: str) -> None:
    assert words in _steadier(rule)


@pytest.mark.parametrize("weight", [1e13, -1e13, 1e300])
def test_a_weight_beyond_all_measure_is_refused_in_spec_and_call(weight: float) -> None:
    base = {"w": torch.zeros(2)}
    raw = {"base": "./base", "experts": {"a": {"model": "./a", "weight": weight}}, "merge": "average"}

    with pytest.raises(SpecError, match=r"weights\.a"):
        merging.merge("average", base, {"a": base}, weights={"a": weight})
    with pytest.raises(SpecError, match=r"experts\.a\.weight: found the number"):
        merging.Pipeline.from_spec(raw)
