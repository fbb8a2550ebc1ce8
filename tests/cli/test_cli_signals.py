"""A signal ends a run as such, also where a library's own tidying up fails over it."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path
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


BEGIN = """
import os, signal, sys, time
from merging_cli import signals

def struck(number=signal.SIGINT):
    os.kill(os.getpid(), number)
    time.sleep(0.01)

"""


def ended(script: str) -> tuple[int, str, str]:
    """Code, stdout and stderr of a process that does this with the command's answers to signals."""
    done = subprocess.run(
        [sys.executable, "-c", BEGIN + textwrap.dedent(script)], capture_output=True, text=True, timeout=60
    )
    return done.returncode, done.stdout, done.stderr


def test_an_interrupt_that_a_callback_loses_is_raised_again_and_no_traceback_is_shown() -> None:
    code, out, said = ended("""
        import weakref
        class Thing: pass
        signals.answer_by_exception()
        thing = Thing()
        watch = weakref.ref(thing, lambda _: struck())
        try:
            del thing
            time.sleep(30)
        except KeyboardInterrupt:
            signals.answered()
            struck()
            time.sleep(0.2)
            print("arrived")
    """)

    assert (code, out, said) == (0, "arrived\n", "")


@pytest.mark.parametrize("number", ["SIGINT", "SIGTERM"])
def test_a_stop_that_a_library_swallows_is_raised_again(number: str) -> None:
    code, out, _ = ended(f"""
        signals.answer_by_exception()
        try:
            try:
                struck(signal.{number})
            except BaseException:
                pass
            time.sleep(30)
        except (KeyboardInterrupt, SystemExit) as error:
            print(type(error).__name__, signals.asked() is not None)
            signals.answered()
    """)

    assert code == 0
    assert out.split() == [{"SIGINT": "KeyboardInterrupt", "SIGTERM": "SystemExit"}[number], "True"]


def test_tidying_up_is_left_in_peace() -> None:
    """Also where it meets errors of its own."""
    code, out, _ = ended("""
        signals.answer_by_exception()
        try:
            try:
                struck()
            finally:
                try:
                    [].pop()
                except IndexError:
                    time.sleep(0.3)
                time.sleep(0.3)
                print("tidy")
        except KeyboardInterrupt:
            signals.answered()
            print("arrived")
    """)

    assert (code, out.split()) == (0, ["tidy", "arrived"])


def test_no_exception_goes_through_an_import(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(
        "import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(0.3)\nwhole = True\n"
    )
    code, out, _ = ended(f"""
        sys.path.insert(0, {str(tmp_path)!r})
        signals.answer_by_exception()
        try:
            import slow
            time.sleep(30)
        except KeyboardInterrupt:
            print("whole", slow.whole)
    """)

    assert (code, out.split()) == (0, ["whole", "True"])


@pytest.mark.parametrize(
    ("number", "expected", "line"), [("SIGINT", 130, "interrupted\n"), ("SIGTERM", 143, "stopped by SIGTERM")]
)
def test_before_anything_is_begun_the_process_ends_at_once(number: str, expected: int, line: str) -> None:
    code, _, said = ended(f"""
        signals.answer_by_exception()
        with signals.nothing_begun():
            try:
                struck(signal.{number})
            finally:
                print("not reached", flush=True)
    """)

    assert code == expected
    assert said.startswith(line)
    assert "not reached" not in said


def test_an_echo_of_a_signal_is_one_signal_and_a_later_one_ends_the_process() -> None:
    """Ctrl-C reaches all processes of a group, and some parents send it on."""
    code, out, said = ended("""
        signals._PATIENCE = 0.2
        signals.answer_by_exception()
        try:
            struck()
        except KeyboardInterrupt:
            struck()
            print("still tidying up", flush=True)
            time.sleep(0.3)
            struck()
            print("not reached", flush=True)
    """)

    assert (code, out, said) == (130, "still tidying up\n", "interrupted\n")


def test_after_the_end_a_signal_changes_neither_code_nor_words() -> None:
    code, _, said = ended("""
        import atexit
        atexit.register(struck)
        signals.answer_by_exception()
        signals.end_quietly(1)
        sys.exit(1)
    """)

    assert (code, said) == (1, "")


def test_loading_the_command_can_be_interrupted_from_the_first_moment() -> None:
    """What it loads first says that it came; what it loads next is slow."""
    code, _, said = ended("""
        import builtins
        from merging_cli import entry
        load = builtins.__import__
        def loading(name, *more, **keys):
            if name == "main":
                struck()
            return load(name, *more, **keys)
        builtins.__import__ = loading
        entry.run()
    """)

    assert (code, said) == (130, "interrupted\n")


def test_a_failure_after_a_lost_interrupt_is_told_as_the_interrupt(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As of a module that an interrupt left half loaded."""
    monkeypatch.setattr(command.signals, "asked", lambda: KeyboardInterrupt())
    monkeypatch.setattr(command.typer.main, "get_command", lambda app: _Stumbling(RecursionError()))

    assert command.main(["list"]) == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_a_signal_that_the_process_was_started_to_ignore_is_ignored() -> None:
    """So a shell starts jobs in the background, which Ctrl-C must not end."""
    code, out, _ = ended("""
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signals.answer_at_once()
        signals.answer_by_exception()
        with signals.nothing_begun():
            struck()
        struck()
        print("went on")
    """)

    assert (code, out.split()) == (0, ["went", "on"])
