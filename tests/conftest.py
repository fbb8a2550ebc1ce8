"""What all tests share."""

from __future__ import annotations

import os
import signal

import pytest
import torch
from golden_adapters.summary import pytest_terminal_summary

__all__ = ["pytest_terminal_summary"]


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Nothing of the user's cache is read or written."""
    os.environ["MERGING_CACHE"] = str(tmp_path_factory.mktemp("cache"))


if (
    signal.getsignal(signal.SIGINT) == signal.SIG_IGN
):  # as in a job in the background; commands would inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)

torch.set_num_threads(
    1
)  # tiny models: more threads only wait for each other, all the more with several workers
