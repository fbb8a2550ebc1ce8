"""How errors are told: a message on stderr or, with --json, one document on stdout; never a traceback."""

from __future__ import annotations

import json
import sys
from typing import Any

import typer

from merging.errors import MergingError

from . import signals
from .output import discard, printable, say


def failed(error: MergingError, *, as_json: bool) -> int:
    """An error that we know: message, problems, remedy."""
    if not as_json or not _print_json(
        error.message, error.remedy, [problem._asdict() for problem in error.problems]
    ):
        _say(str(error))
    return error.exit_code


def lost(why: str) -> int:
    """Results that cannot be written to stdout, as on a full disk: what a run made is there all the same."""
    discard(sys.stdout)
    remedy = "Make room, or send stdout elsewhere, and give the command again: what a run finished is kept."
    _say(f"stdout: the answer cannot be written there ({why})\n  {remedy}")
    return 1


def usage(error: Any, *, as_json: bool) -> int:
    """Arguments that the command line does not understand."""
    context = getattr(error, "ctx", None)
    command = context.command_path if context is not None else "merging"
    message, remedy = error.format_message(), f"See: {command} --help"
    if not as_json or not _print_json(message, remedy, []):
        _say(f"{message}\n  {remedy}")
    return 2


def unexpected(error: Exception, *, as_json: bool) -> int:
    """A fault of ours, or of a library: one line."""
    text = " ".join(str(error).split())
    message = (
        f"unexpected {type(error).__name__}: {text[:300]}" if text else f"unexpected {type(error).__name__}"
    )
    if not as_json or not _print_json(message, "Run with --debug for the traceback.", []):
        _say(f"{message}; run with --debug")
    return 1


def interrupted() -> int:
    return _told(signals.INTERRUPT, 130)


def stopped() -> int:
    return _told(signals.TERMINATE, 143)


def _told(number: int, code: int) -> int:
    signals.answered()
    say(signals.words(number))
    return code


def _say(text: str) -> None:
    try:
        typer.echo(f"{typer.style('error:', fg='red', bold=True)} {printable(text)}", err=True)
    except OSError:
        discard(sys.stderr)


def _print_json(message: str, remedy: str, problems: list[dict[str, str]]) -> bool:
    """Whether it could be written."""
    document = {"error": {"message": message, "problems": problems, "remedy": remedy}}
    try:
        sys.stdout.write(json.dumps(document, indent=2) + "\n")
        sys.stdout.flush()
    except OSError:
        discard(sys.stdout)
        return False
    return True
