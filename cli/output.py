"""Results go to stdout, talk goes to stderr."""

from __future__ import annotations

import json
import os
import re
import sys
import traceback
from contextlib import suppress
from typing import TextIO

import typer

# Control characters but tab and newline, and those that set the direction of text.
_STEERING = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def print_json(value: object) -> None:
    """The only document on stdout; models, dataclasses and paths become JSON values."""
    from pydantic_core import to_jsonable_python

    typer.echo(json.dumps(to_jsonable_python(value, inf_nan_mode="null"), indent=2))


def say(text: str) -> None:
    """Talk: on stderr, so that stdout holds results only. Where it cannot be written, as on a full disk, it
    is lost, and what is talked of goes on."""
    try:
        typer.echo(printable(text), err=True)
    except BrokenPipeError:
        raise
    except OSError:
        discard(sys.stderr)


def print_text(text: str) -> None:
    """Results, for people."""
    typer.echo(printable(text))


def discard(stream: TextIO) -> None:
    """What the stream still holds, and what is written from now on, goes nowhere: so that nothing is left
    that Python could fail to flush at exit."""
    with suppress(OSError, ValueError):  # ValueError: a stream without a number, as of a test
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


def not_written(error: BaseException) -> str:
    """Why results could not be written to stdout, if that is this error; else empty. `say` lets none by, so
    what comes from an echo is of stdout: of ours, or of typer's own help."""
    frames = traceback.extract_tb(error.__traceback__)
    if not isinstance(error, OSError) or not frames or frames[-1].name not in ("echo", "flush_results"):
        return ""
    return error.strerror or str(error)


def flush_results() -> None:
    """What was printed gets to stdout now, or raises an error that `not_written` knows."""
    sys.stdout.flush()


def printable(text: str) -> str:
    """Characters that would steer the terminal, or turn the order of what it shows, as escapes: names of
    tensors, files and tasks come from others."""
    return _STEERING.sub(lambda one: one[0].encode("unicode_escape").decode(), text)


def is_main_process() -> bool:
    """Under torchrun all processes do the work, the first one speaks."""
    return os.environ.get("RANK", "0") == "0"
