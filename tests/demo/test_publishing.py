"""Files and folders appear whole or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from merging.demo.publishing import copy, published


def test_nothing_is_there_before_the_end(tmp_path: Path) -> None:
    target = tmp_path / "models" / "base"

    with published(target) as making:
        making.mkdir()
        (making / "weights").write_text("whole")
        seen_while_making = target.exists()

    assert not seen_while_making
    assert (target / "weights").read_text() == "whole"


def test_an_error_leaves_nothing(tmp_path: Path) -> None:
    def stop_halfway() -> None:
        with published(tmp_path / "base") as making:
            making.write_text("half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stop_halfway()

    assert list(tmp_path.iterdir()) == []


def test_of_two_makers_the_first_wins(tmp_path: Path) -> None:
    target = tmp_path / "base"

    with published(target) as second:
        second.mkdir()
        (second / "weights").write_text("second")
        with published(target) as first:
            first.mkdir()
            (first / "weights").write_text("first")

    assert (target / "weights").read_text() == "first"
    assert list(tmp_path.iterdir()) == [target]


@pytest.mark.parametrize("inside", ["", "folder/"])
def test_a_copy_does_not_follow_its_original(tmp_path: Path, inside: str) -> None:
    original = tmp_path / "original" / f"{inside}file"
    original.parent.mkdir(parents=True)
    original.write_text("before")

    copy(tmp_path / "original", tmp_path / "copy")
    original.write_text("after")

    assert (tmp_path / "copy" / f"{inside}file").read_text() == "before"
