"""The three registries, and the decorators that add to them."""

from __future__ import annotations

from typing import Any

from merging.arguments import checked, one_of
from merging.backbones import BUILTIN as BACKBONES
from merging.calibrators import BUILTIN as CALIBRATORS
from merging.contracts.backbone import Backbone
from merging.contracts.calibrator import Calibrator
from merging.contracts.merger import Merger
from merging.registry import Registry
from merging.strategies import BUILTIN as STRATEGIES

strategies: Registry[Merger] = Registry("strategy", "merging.strategies", STRATEGIES, Merger)
calibrators: Registry[Calibrator] = Registry("calibrator", "merging.calibrators", CALIBRATORS, Calibrator)
backbones: Registry[Backbone] = Registry("backbone", "merging.backbones", BACKBONES, Backbone)

strategy = strategies.register
calibrator = calibrators.register
backbone = backbones.register


@checked(kind=one_of("strategies", "calibrators", "backbones"))
def available(kind: str) -> tuple[str, ...]:
    """Names of all strategies, calibrators or backbones, including those of plug-ins. SpecError for any other
    word."""
    registries: dict[str, Registry[Any]] = {
        "strategies": strategies,
        "calibrators": calibrators,
        "backbones": backbones,
    }
    return registries[kind].names()
