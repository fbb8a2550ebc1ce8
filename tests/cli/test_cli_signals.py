"""A signal ends a run as such, also where a library's own tidying up fails over it."""

from __future__ import annotations

from typing import Any

import pytest
from merging_cli import main as command


class _Stumbling:
    """A command that is stopped in the middle of something whose `finally` fails."""

    def __init__(self, stop: BaseException) -> None:
        self.stop = stop

    def main(self, *arguments: Any, **keys: Any) -> int:
        try:
            raise self.stop
        finally:
            raise UnboundLocalError("cannot access local variable")


def test_ctrl_c_is_told_as_such(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(command.typer.main, "get_command", lambda app: _Stumbling(KeyboardInterrupt()))

    assert command.main(["list"]) == 130
    assert "unexpected" not in capsys.readouterr().err


def test_a_sigterm_is_an_exit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command.typer.main, "get_command", lambda app: _Stumbling(SystemExit(143)))

    with pytest.raises(SystemExit) as ended:
        command.main(["list"])

    assert ended.value.code == 143
