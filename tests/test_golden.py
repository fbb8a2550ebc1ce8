"""Recorded outputs of the authors' code, case by case, from the folder that MERGING_GOLDEN names."""

from __future__ import annotations

import hashlib
import json
import os
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from golden_adapters import ADAPTERS, NOT_BUILT
from golden_adapters.expressing import resolve
from golden_adapters.summary import INFORMATIONAL, UNBUILT
from safetensors.torch import load_file
from torch import Tensor

FOLDER = Path(os.environ.get("MERGING_GOLDEN") or Path(__file__).parent / "golden")
MANIFEST = json.loads((FOLDER / "manifest.json").read_text())
CASES = {case["id"]: case for case in MANIFEST["cases"]}


@pytest.mark.parametrize("name", MANIFEST["files"])
def test_tensor_file_is_the_recorded_one(name):
    digest = hashlib.sha256((FOLDER / name).read_bytes()).hexdigest()

    assert digest == MANIFEST["files"][name]["sha256"]


def test_methods_are_either_built_or_listed_as_not_built():
    methods = {case["method"] for case in CASES.values()}

    assert not methods - set(ADAPTERS) - NOT_BUILT, "a method without an adapter must be listed in NOT_BUILT"
    assert not NOT_BUILT & set(ADAPTERS), "a method with an adapter must not be listed in NOT_BUILT"


@pytest.mark.parametrize("identity", CASES)
def test_golden(identity):
    case = CASES[identity]
    if case["method"] in NOT_BUILT:
        UNBUILT.setdefault(case["method"], []).append(identity)
        return

    outputs = ADAPTERS[case["method"]](case, tensors(case["file"]))

    misses = compared(case, outputs)
    if case.get("informational"):
        INFORMATIONAL[identity] = misses
        return
    assert not misses, "\n".join([case.get("notes", ""), *misses])


def compared(case: dict[str, Any], outputs: dict[str, Any]) -> list[str]:
    """What differs from the recorded outputs; of an output and its float64 twin, the twin counts."""
    stored, ours = tensors(case["file"]), flat(outputs)
    misses = []
    for name, keys in case["outputs"].items():
        if f"{name}_float64" in case["outputs"]:
            continue
        tolerance = case.get("tolerances", {}).get(name, case["tolerance"])
        for path, recorded in flat({name: resolve(keys, stored)}).items():
            found = ours.get(path, ours.get(path.replace(name, name.removesuffix("_float64"), 1)))
            misses += [f"{path}: {miss}" for miss in difference(found, recorded, tolerance)]
    return misses


def difference(ours: Any, recorded: Tensor, tolerance: dict[str, float]) -> list[str]:
    if ours is None:
        return ["the adapter does not give it"]
    ours = torch.as_tensor(ours)
    if ours.shape != recorded.shape:
        return [f"shape {tuple(ours.shape)}, recorded {tuple(recorded.shape)}"]
    if torch.allclose(ours.double(), recorded.double(), **tolerance):
        return []
    gap = (ours.double() - recorded.double()).abs().max()
    return [f"differs by up to {gap:.3g}, allowed {tolerance}"]


def flat(values: Any, prefix: str = "") -> dict[str, Any]:
    """Nested dicts and lists of tensors as one dict: {"merged": [{"w": ...}]} has the key "merged/0/w"."""
    if not isinstance(values, dict | list):
        return {prefix: values}
    items = values.items() if isinstance(values, dict) else enumerate(values)
    below = [flat(value, f"{prefix}/{key}" if prefix else str(key)) for key, value in items]
    return {path: value for part in below for path, value in part.items()}


@cache
def tensors(file: str) -> dict[str, Tensor]:
    return load_file(FOLDER / file)
