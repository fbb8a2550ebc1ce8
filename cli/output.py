"""Results go to stdout, talk goes to stderr."""

from __future__ import annotations

import json
import os
import re

import typer

# Control characters but tab and newline, and those that set the direction of text.
_STEERING = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def print_json(value: object) -> None:
    """The only document on stdout; models, dataclasses and paths become JSON values."""
    from pydantic_core import to_jsonable_python

    typer.echo(json.dumps(to_jsonable_python(value, inf_nan_mode="null"), indent=2))


def say(text: str) -> None:
    """Talk: on stderr, so that stdout holds results only."""
    typer.echo(printable(text), err=True)


def print_text(text: str) -> None:
    """Results, for people."""
    typer.echo(printable(text))


def printable(text: str) -> str:
    """Characters that would steer the terminal, or turn the order of what it shows, as escapes: names of
    tensors, files and tasks come from others."""
    return _STEERING.sub(lambda one: one[0].encode("unicode_escape").decode(), text)


def is_main_process() -> bool:
    """Under torchrun all processes do the work, the first one speaks."""
    return os.environ.get("RANK", "0") == "0"
