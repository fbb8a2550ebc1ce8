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
    stored = tensors(case["file"])
    misses = []
    for name, keys in case["outputs"].items():
        if f"{name}_float64" in case["outputs"]:
            continue
        ours = output(name, outputs)
        if ours is None:
            misses.append(f"{name}: the adapter gives {', '.join(outputs)}")
            continue
        tolerance = case.get("tolerances", {}).get(name, case["tolerance"])
        misses += differences(name, ours, resolve(keys, stored), tolerance)
    return misses


def output(name: str, outputs: dict[str, Any]) -> Any:
    """What the adapter gives for an output: as one value, or as "name/..." tensor by tensor."""
    for own_name in dict.fromkeys([name, name.removesuffix("_float64")]):
        below = {
            key.removeprefix(f"{own_name}/"): value
            for key, value in outputs.items()
            if key.startswith(f"{own_name}/")
        }
        if own_name in outputs or below:
            return outputs.get(own_name, below)
    return None


def differences(where: str, ours: Any, theirs: Any, tolerance: dict[str, float]) -> list[str]:
    if isinstance(theirs, dict):
        if not isinstance(ours, dict) or set(ours) != set(theirs):
            return [f"{where}: has {_names(ours)}, recorded are {_names(theirs)}"]
        return [
            line
            for key in theirs
            for line in differences(f"{where}/{key}", ours[key], theirs[key], tolerance)
        ]
    if isinstance(theirs, list):
        if len(ours) != len(theirs):
            return [f"{where}: has {len(ours)} entries, recorded are {len(theirs)}"]
        pairs = enumerate(zip(ours, theirs, strict=True))
        return [line for i, (a, b) in pairs for line in differences(f"{where}[{i}]", a, b, tolerance)]
    ours = torch.as_tensor(ours)
    if ours.shape != theirs.shape:
        return [f"{where}: shape {tuple(ours.shape)}, recorded {tuple(theirs.shape)}"]
    if torch.allclose(ours.double(), theirs.double(), **tolerance):
        return []
    gap = (ours.double() - theirs.double()).abs().max()
    return [f"{where}: differs by up to {gap:.3g}, allowed {tolerance}"]


@cache
def tensors(file: str) -> dict[str, Tensor]:
    return load_file(FOLDER / file)


def _names(value: Any) -> str:
    return ", ".join(sorted(value)) if isinstance(value, dict) else type(value).__name__
