"""`merging drift`: how far merged and calibrated model are from the experts, block by block."""

from __future__ import annotations

import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Annotated

import typer

from merging.working_folder import working_folder

from .output import is_main_process, print_json, print_text, say
from .pipeline import Device, Json, Out, Overwrite, Quiet, Sets, Spec, opened
from .progress import progress_to_stderr

DRIFT_EXAMPLE = "Example: merging drift spec.json --plot drift.svg"


def drift(
    spec: Spec,
    out: Out = None,
    sets: Sets = None,
    examples: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=1, help="Examples of each task, at most; 16 if not given.", show_default=False
        ),
    ] = None,
    frechet: Annotated[
        bool,
        typer.Option(
            "--frechet/--no-frechet",
            help="Also the distance between tokens as Gaussians, which takes longer.",
        ),
    ] = True,
    plot: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Draw it, too, as SVG.", show_default=False),
    ] = None,
    device: Device = None,
    overwrite: Overwrite = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """How far each block is from the expert's, before and after calibrating, and how much it adds itself.

    Does what is missing of the run first; the result also goes into its report.json. No labels are read.
    """
    if plot is not None and not plot.is_absolute():
        working_folder()  # which may be gone
    pipeline = opened(spec, sets)
    with progress_to_stderr(quiet=quiet) as progress, redirect_stdout(sys.stderr):
        found = pipeline.drift(
            out, examples=examples, frechet=frechet, device=device, overwrite=overwrite, progress=progress
        )
    if not is_main_process():
        return
    if plot is not None:
        from merging.checkpoints.atomic import write_atomic
        from merging.report.drift_plot import drift_plot

        plot.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(plot, drift_plot(found))
        say(f"drawn: {plot}")
    if as_json:
        print_json(found)
        return
    from merging.report.drift_table import drift_table

    print_text(drift_table(found))
