"""What all tests share."""

from __future__ import annotations

from golden_adapters.summary import pytest_terminal_summary

__all__ = ["pytest_terminal_summary"]
