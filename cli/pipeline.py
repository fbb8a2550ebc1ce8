"""`merging pipeline`: run, plan, validate, schema."""

from __future__ import annotations

import json
import sys
from contextlib import redirect_stdout
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from merging.errors import SpecError

from .output import is_main_process, print_json, print_text, say
from .progress import progress_to_stderr
from .signals import nothing_begun

if TYPE_CHECKING:
    from merging.pipeline import Pipeline

app = typer.Typer(
    name="pipeline",
    help="Merge, calibrate and measure what a spec describes.",
    epilog="Example: merging pipeline validate spec.json && merging pipeline run spec.json",
    rich_markup_mode=None,
)


class Stage(str, Enum):
    """Where a run may stop."""

    merge = "merge"
    calibrate = "calibrate"


class Criterion(str, Enum):
    """What the points of a sweep are judged by."""

    features = "features"
    entropy = "entropy"
    validation = "validation"


Spec = Annotated[Path, typer.Argument(metavar="SPEC", help="The spec: JSON or YAML.", show_default=False)]
Sets = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="PATH=VALUE",
        help='Override one value by its path: merge.scale=0.4, experts."a.b".weight=2. May be repeated.',
        show_default=False,
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout, nothing else.")]
ReadWeights = Annotated[
    bool,
    typer.Option("--read-weights", help="Read all weights too, as a run does, to find NaN and infinity."),
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress on stderr.")]
Out = Annotated[
    Path | None,
    typer.Option(metavar="DIR", help="Folder of the results; else the spec's.", show_default=False),
]
Device = Annotated[
    str | None,
    typer.Option(metavar="DEV", help="auto, cpu, cuda:0, ...; else the spec's.", show_default=False),
]
Overwrite = Annotated[
    bool,
    typer.Option(
        "--overwrite",
        help="Replace what another spec left in the folder, and results that were changed since.",
    ),
]


@app.callback(invoke_without_command=True)
def _pipeline(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@app.command(epilog="Example: merging pipeline run spec.json --out out --set merge.scale=0.4")
def run(
    spec: Spec,
    out: Out = None,
    sets: Sets = None,
    sweeps: Annotated[
        list[str] | None,
        typer.Option(
            "--sweep",
            metavar="PATH=VALUES",
            help="Try values first and run with the best: merge.scale=0.1:1.0:0.1, or a,b,c. "
            "Repeated, it tries every combination. Test examples are not looked at.",
            show_default=False,
        ),
    ] = None,
    criterion: Annotated[
        Criterion | None,
        typer.Option(
            help="What --sweep judges by; else validation where all tasks have it, and features otherwise.",
            show_default=False,
        ),
    ] = None,
    until: Annotated[Stage | None, typer.Option(help="Stop after this stage.", show_default=False)] = None,
    device: Device = None,
    overwrite: Overwrite = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Merge, calibrate, measure; only what is missing is done. The last line is the final checkpoint."""
    if criterion is not None and not sweeps:
        raise SpecError("--criterion says how --sweep chooses, and there is no --sweep")
    pipeline = opened(spec, sets)
    with progress_to_stderr(quiet=quiet) as progress, redirect_stdout(sys.stderr):
        if sweeps:
            pipeline = pipeline.search(
                sweeps,
                criterion=criterion.value if criterion is not None else None,
                until=until.value if until is not None else None,
                device=device,
                progress=progress,
            )
        report = pipeline.run(
            out,
            until=until.value if until is not None else None,
            device=device,
            overwrite=overwrite,
            progress=progress,
        )
    if not is_main_process():
        return
    if as_json:
        print_json(report)
        return
    from merging.report.table import render

    print_text(render(report))
    typer.echo("")
    print_text(report.checkpoint)


@app.command(epilog="Example: merging pipeline plan spec.json --set merge.type=ties")
def plan(spec: Spec, sets: Sets = None, read_weights: ReadWeights = False, as_json: Json = False) -> None:
    """What a run would do, need and write; of weights only the first rows of each matrix are read."""
    pipeline = opened(spec, sets)
    with progress_to_stderr(quiet=not read_weights) as progress:
        found = pipeline.plan(read_weights=read_weights, progress=progress)
    if as_json:
        print_json(found)
        return
    from .render import render_plan

    print_text(render_plan(found.model_dump(mode="json")))


@app.command(epilog="Example: merging pipeline validate spec.json")
def validate(spec: Spec, sets: Sets = None, read_weights: ReadWeights = False, as_json: Json = False) -> None:
    """Every problem of the spec and of what it names, at once, the gravest first."""
    pipeline = opened(spec, sets)
    with progress_to_stderr(quiet=not read_weights) as progress:
        findings = pipeline.validate(read_weights=read_weights, progress=progress)
    if as_json:
        print_json({"valid": True, "findings": findings})
        return
    for finding in findings:
        say(f"note: {finding}")
    print_text(f"{spec} is valid")


@app.command(epilog="Example: merging pipeline schema > merging.schema.json")
def schema() -> None:
    """The spec's JSON Schema, for editors."""
    from merging.spec import schema

    typer.echo(json.dumps(schema(), indent=2))


def opened(path: Path, sets: list[str] | None) -> Pipeline:
    # The spec is read first: what is wrong with it is answered before torch is imported.
    from merging.spec import load_spec

    with nothing_begun(), redirect_stdout(sys.stderr):  # what plug-ins print is talk, not result
        spec = load_spec(path, sets or ())
        import torch  # noqa: F401 - which takes long, and which no signal should reach later

        from merging.pipeline import Pipeline

        return Pipeline.from_spec(spec)
