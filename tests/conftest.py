"""What all tests share."""

from __future__ import annotations

import torch
from golden_adapters.summary import pytest_terminal_summary

__all__ = ["pytest_terminal_summary"]

torch.set_num_threads(
    1
)  # tiny models: more threads only wait for each other, all the more with several workers
