"""The limit on open files is told as such, whatever was to be opened."""

from __future__ import annotations

import errno

import pytest

from merging.errors import MergingError
from merging.open_files import telling_of_open_files

EMFILE = OSError(errno.EMFILE, "Too many open files")


@pytest.mark.parametrize(
    "error",
    [EMFILE, RuntimeError("cannot open x: Too many open files (os error 24)"), ImportError(str(EMFILE))],
    ids=["os", "safetensors", "import"],
)
def test_any_of_its_errors_names_the_limit(error):
    with pytest.raises(MergingError, match="too many files are open") as caught, telling_of_open_files():
        raise error

    assert "ulimit -n" in caught.value.remedy


def test_an_error_that_came_of_it_too():
    with pytest.raises(MergingError, match="too many files are open"), telling_of_open_files():
        raise MergingError("the base cannot be read") from EMFILE


@pytest.mark.parametrize("error", [OSError(errno.EACCES, "denied"), MergingError("x"), ValueError("24")])
def test_others_pass(error):
    with pytest.raises(type(error)) as caught, telling_of_open_files():
        raise error

    assert caught.value is error
