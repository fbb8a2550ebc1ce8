"""Model merging and post-merge calibration.

Everything here is loaded when first used: `import merging` itself takes no time.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from merging.api import merge as merge
    from merging.components import available as available
    from merging.components import backbone as backbone
    from merging.components import calibrator as calibrator
    from merging.components import strategy as strategy
    from merging.contracts.backbone import Backbone as Backbone
    from merging.contracts.calibrator import Calibrator as Calibrator
    from merging.contracts.merger import Merger as Merger
    from merging.contracts.merger import TensorMerger as TensorMerger
    from merging.errors import MergingError as MergingError
    from merging.layerwise import LayerwiseCalibrator as LayerwiseCalibrator
    from merging.layerwise import LayerwiseMerger as LayerwiseMerger
    from merging.pipeline import Pipeline as Pipeline
    from merging.report.report import Report as Report
    from merging.settings import Settings as Settings
    from merging.spec import PipelineSpec as PipelineSpec
    from merging.tracer import ActivationTracer as ActivationTracer
    from merging.verifying import verify as verify

__version__ = "0.1.0"

_HOMES = {
    "ActivationTracer": "merging.tracer",
    "Backbone": "merging.contracts.backbone",
    "Calibrator": "merging.contracts.calibrator",
    "LayerwiseCalibrator": "merging.layerwise",
    "LayerwiseMerger": "merging.layerwise",
    "Merger": "merging.contracts.merger",
    "MergingError": "merging.errors",
    "Pipeline": "merging.pipeline",
    "PipelineSpec": "merging.spec",
    "Report": "merging.report.report",
    "Settings": "merging.settings",
    "TensorMerger": "merging.contracts.merger",
    "available": "merging.components",
    "backbone": "merging.components",
    "calibrator": "merging.components",
    "merge": "merging.api",
    "strategy": "merging.components",
    "verify": "merging.verifying",
}

__all__ = ["__version__", *_HOMES]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'merging' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
