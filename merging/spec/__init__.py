"""The spec of a run: what spec.json may say, read and checked all at once, without importing torch."""

from __future__ import annotations

from merging.data.spec import TaskSpec
from merging.spec.component import Component
from merging.spec.pipeline_spec import ExpertRef, ModelRef, OutputSpec, PipelineSpec
from merging.spec.reading import load_spec, parse_spec
from merging.spec.schema import schema

__all__ = [
    "Component",
    "ExpertRef",
    "ModelRef",
    "OutputSpec",
    "PipelineSpec",
    "TaskSpec",
    "load_spec",
    "parse_spec",
    "schema",
]
