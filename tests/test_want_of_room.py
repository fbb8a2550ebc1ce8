"""A disk that is full is told in the same words, whatever was being written."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from safetensors import SafetensorError

from merging.errors import MergingError, OutputError
from merging.want_of_room import want_of_room


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
        SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"),
    ],
    ids=["no space", "safetensors"],
)
def test_any_write_without_room_says_where_and_what_to_do(error: Exception) -> None:
    with pytest.raises(MergingError, match="no room to write in out: ") as raised, want_of_room(Path("out")):
        raise error

    assert "Make room" in raised.value.remedy
    assert raised.value.exit_code == 1


def test_a_limit_on_the_size_of_files_is_no_want_of_room() -> None:
    words = "no room to write in out: "
    with pytest.raises(MergingError, match=words) as raised, want_of_room(Path("out")):
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))

    assert "ulimit -f" in raised.value.remedy
    assert "Make room" not in raised.value.remedy


def test_an_error_that_came_of_it_keeps_its_words_and_is_told_what_to_do() -> None:
    def write() -> None:
        try:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            raise OutputError("out/report.json cannot be written: No space left on device") from error

    with (
        pytest.raises(MergingError, match=r"report\.json cannot be written") as raised,
        want_of_room(Path("out")),
    ):
        write()

    assert "Make room" in raised.value.remedy
    assert raised.value.exit_code == 1  # found during the run, not beforehand


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.EACCES, "Permission denied"),
        SafetensorError("Error while deserializing header: HeaderTooLarge"),
        MergingError("no room", remedy="Buy a disk."),
    ],
)
def test_other_errors_pass(error: Exception) -> None:
    with pytest.raises(type(error)) as raised, want_of_room(Path("out")):
        raise error

    assert raised.value is error
