"""Fingerprints and manifests: what a checkpoint was made from, so that it can be made again or known to be
done."""

from __future__ import annotations

import hashlib
import json
import platform
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import merging
from merging.checkpoints.manifest import FORMAT
from merging.opened import Input, Opened
from merging.spec import Component, PipelineSpec

PACKAGES = ("torch", "transformers", "safetensors", "numpy", "accelerate", "open_clip_torch")


def versions() -> dict[str, str]:
    """Of this package, Python and what it computes with."""
    found = {"merging": merging.__version__, "python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def code_of(method: type) -> str:
    """SHA-256 of the file that defines a method; empty where there is no such file."""
    file = getattr(sys.modules.get(method.__module__), "__file__", None)
    return hashlib.sha256(Path(file).read_bytes()).hexdigest() if file and Path(file).is_file() else ""


def fingerprint(values: Any) -> str:
    """SHA-256 of JSON values, in one canonical form."""
    text = json.dumps(values, sort_keys=True, ensure_ascii=False, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def merge_facts(
    spec: PipelineSpec, hashes: Mapping[str, Mapping[str, str]], calibration: Mapping[str, str]
) -> dict[str, Any]:
    """Everything that decides the merged checkpoint's bytes. `hashes`: role -> file -> SHA-256."""
    asked = spec.canonical()
    keys = ("backbone", "merge", "output", "precision", "seed", "vocabulary")
    weights = {task: expert["weight"] for task, expert in asked["experts"].items()}
    return {
        **{key: asked[key] for key in keys},
        "weights": weights,
        "inputs": {role: sorted(files.values()) for role, files in hashes.items()},
        "calibration": dict(calibration),
        "version": merging.__version__,
    }


def inputs_read(inputs: Mapping[str, Input], hashes: Mapping[str, Mapping[str, str]]) -> dict[str, Any]:
    """What a manifest says of inputs: role -> name in the spec, place, revision, and SHA-256 of each file.
    `hashes`: role -> file -> SHA-256."""
    return {
        role: {
            "model": given.name,
            "path": str(given.folder),
            "revision": given.revision,
            "files": {name: {"sha256": digest} for name, digest in hashes[role].items()},
        }
        for role, given in inputs.items()
    }


def manifest(
    *,
    stage: str,
    facts: Mapping[str, Any],
    spec: PipelineSpec,
    opened: Opened,
    inputs: Mapping[str, Any],
    methods: Sequence[tuple[Component, Any]],
    device: str,
    calibration: Mapping[str, Mapping[str, Any]],
    notes: Mapping[str, Any],
) -> dict[str, Any]:
    """manifest.json of a checkpoint; the sink adds its files and their hashes. `inputs`: see `inputs_read`;
    `methods`: what was asked for and what did it, in order."""
    return {
        "format": FORMAT,
        "stage": stage,
        "fingerprint": fingerprint(facts),
        "spec": spec.model_dump(mode="json"),
        "versions": versions(),
        "seed": spec.seed,
        "device": device,
        "plan": [
            {
                "method": asked.type,
                "settings": asked.settings.model_dump(mode="json"),
                "paper": method.paper,
                "needs": sorted(method.needs),
            }
            for asked, method in methods
        ],
        "inputs": {role: given for role, given in inputs.items() if role in opened.inputs},
        "data": {role: given for role, given in inputs.items() if role not in opened.inputs},
        "calibration": {task: dict(facts) for task, facts in calibration.items()},
        "kept_from_base": sorted(opened.models.kept),
        "notes": dict(notes),
    }
