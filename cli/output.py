"""Results go to stdout, talk goes to stderr."""

from __future__ import annotations

import json
import os

import typer


def print_json(value: object) -> None:
    """The only document on stdout; models, dataclasses and paths become JSON values."""
    from pydantic_core import to_jsonable_python

    typer.echo(json.dumps(to_jsonable_python(value, inf_nan_mode="null"), indent=2))


def say(text: str) -> None:
    """Talk: on stderr, so that stdout holds results only."""
    typer.echo(text, err=True)


def is_main_process() -> bool:
    """Under torchrun all processes do the work, the first one speaks."""
    return os.environ.get("RANK", "0") == "0"
