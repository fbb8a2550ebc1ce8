"""The command `merging`: its sub-commands, and what becomes of errors."""

from __future__ import annotations

import io
import os
import sys
import traceback
from collections.abc import Sequence
from typing import Annotated

import typer

import merging
from merging.address_space import refuse_too_little_space
from merging.allocator import share_one_arena
from merging.errors import MergingError
from merging.file_names import telling_of_names
from merging.interpreter import refuse_without_docstrings
from merging.open_files import allow_open_files, telling_of_open_files
from merging.want_of_memory import telling_of_memory
from merging.working_folder import leave_if_gone

from . import checkpoints, components, demo, drift, pipeline, signals, verify
from .failures import failed, interrupted, lost, stopped, unexpected, usage
from .output import discard, flush_results, not_written

UsageError: type[Exception] = typer.BadParameter.__mro__[1]  # typer brings its own copy of click's
_ANSWERED = (UsageError, BrokenPipeError, typer.Abort)  # by `main`, whatever was the matter with memory
_STOPPED = 143  # code of the SystemExit that a SIGTERM raises

app = typer.Typer(
    name="merging",
    help="Merge fine-tuned experts into one model, repair it layer by layer, measure what was regained.",
    epilog="Example: merging demo, or: merging pipeline run spec.json --set merge.scale=0.4",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["--help", "-h"]},
)
app.add_typer(pipeline.app)
app.command("demo", epilog=demo.EXAMPLE)(demo.demo)
app.command("drift", epilog=drift.DRIFT_EXAMPLE)(drift.drift)
app.command("list", epilog=components.LIST_EXAMPLE)(components.list_methods)
app.command("show", epilog=components.SHOW_EXAMPLE)(components.show)
app.command("inspect", epilog=checkpoints.INSPECT_EXAMPLE)(checkpoints.inspect)
app.command("compare", epilog=checkpoints.COMPARE_EXAMPLE)(checkpoints.compare)
app.command("verify", epilog=verify.VERIFY_EXAMPLE)(verify.verify)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"merging {merging.__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _main(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="Show tracebacks; may stand before or after the sub-command.")
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def run() -> None:
    """Ends the process with the exit code of `main`. A SIGTERM cleans up as Ctrl-C does."""
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # torch then asks for huge pages, where Linux has them
    share_one_arena()
    try:
        signals.answer_by_exception()
        refuse_too_little_space()
        _say_what_can_be_said()
        code = main(sys.argv[1:])
    except KeyboardInterrupt:
        code = interrupted()
    except SystemExit as end:
        if end.code != _STOPPED:
            raise
        code = stopped()
    signals.end_quietly(code)
    sys.exit(code)


def _say_what_can_be_said() -> None:
    """Letters that the streams do not know, as of names of tasks, are said as escapes."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def main(arguments: Sequence[str]) -> int:
    """Follow the arguments; 0: done, 1: the run failed, 2: the request was wrong. Errors become messages."""
    leave_if_gone()
    debug, as_json = "--debug" in arguments, "--json" in arguments
    words = [word for word in arguments if word != "--debug"]
    try:
        with telling_of_memory(*_ANSWERED), telling_of_names(), telling_of_open_files():
            refuse_without_docstrings()
            allow_open_files()
            code = typer.main.get_command(app).main(words, prog_name="merging", standalone_mode=False)
        flush_results()
        return interrupted() if code == 130 else code if isinstance(code, int) else 0
    except (KeyboardInterrupt, typer.Abort):
        return interrupted()
    except BrokenPipeError:
        discard(sys.stdout)  # whoever read our output has seen enough
        return 1
    except UsageError as error:
        return usage(error, as_json=as_json)
    except SystemExit as end:
        if signals.asked() is not None or _is_stop(end):
            raise
        return _ended(end, debug=debug, as_json=as_json)
    except Exception as error:
        if (stop := _stopped_while(error)) is not None:
            if isinstance(stop, SystemExit):
                raise stop from None
            return interrupted()
        if debug:
            raise
        if why := not_written(error):
            return lost(why)
        if isinstance(error, MergingError):
            return failed(error, as_json=as_json)
        return unexpected(error, as_json=as_json)


def _ended(end: SystemExit, *, debug: bool, as_json: bool) -> int:
    """Code that the command calls, a plug-in or a library, asked for the process to end: nothing is done."""
    if debug:
        raise RuntimeError(f"ended by {end!r}") from end
    frames = traceback.extract_tb(end.__traceback__)
    place = f"{frames[-1].filename}, line {frames[-1].lineno} ({frames[-1].name})" if frames else "some code"
    error = MergingError(
        f"{place} raised SystemExit: {end}, which ends the process before the command is done",
        remedy="Where that is a plug-in: raise an exception that says what is wrong, or return a result.",
    )
    return failed(error, as_json=as_json)


def _stopped_while(error: BaseException) -> BaseException | None:
    """The signal that was being answered when this error came up: libraries' own tidying up may fail then,
    and so may what they left half loaded."""
    if (asked := signals.asked()) is not None:
        return asked
    context = error.__context__
    while context is not None and not _is_stop(context):
        context = context.__context__
    return context


def _is_stop(error: BaseException) -> bool:
    """Whether a signal raised it; code that asks for the process to end raises SystemExit too."""
    return isinstance(error, KeyboardInterrupt) or (isinstance(error, SystemExit) and error.code == _STOPPED)
