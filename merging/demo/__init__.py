"""A small suite of real experts, made from what registry packages contain."""

from __future__ import annotations

from merging.demo.suite import build

__all__ = ["build"]
