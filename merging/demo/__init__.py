"""Small suites of real experts, made from what registry packages contain."""

from __future__ import annotations

from merging.demo.llm.suite import SUITE as LLM
from merging.demo.suite import Suite, build
from merging.demo.vision.suite import SUITE as VISION

SUITES = {suite.name: suite for suite in (VISION, LLM)}

__all__ = ["SUITES", "Suite", "build"]
