"""`merging demo`: real experts, merged, calibrated and measured, and a spec to go on from."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from merging.errors import SpecError

from .output import say
from .progress import progress_to_stderr

EXAMPLE = "Example: merging demo --out merging-demo"
SUITES: Mapping[str, str] = {"vision": "three image tasks on one vision transformer"}


def demo(
    suite: Annotated[
        str, typer.Option(metavar="NAME", help=f"Which experts: {', '.join(SUITES)}.")
    ] = "vision",
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder of the demo.")] = Path("merging-demo"),
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress on stderr.")] = False,
) -> None:
    """Build small real experts (or find them in the cache), merge, calibrate and measure them."""
    from merging.registry import did_you_mean

    if suite not in SUITES:
        raise SpecError(f'there is no demo suite "{suite}"', remedy=did_you_mean(suite, SUITES))
    from merging.demo import build

    say(f"demo: {SUITES[suite]}, in {out}/")
    with progress_to_stderr(quiet=quiet) as progress:
        path = build(out, progress=progress)
    from merging.pipeline import Pipeline
    from merging.report.table import render
    from merging.spec import load_spec

    from .render import key_values

    spec = load_spec(path)
    with progress_to_stderr(quiet=quiet) as progress:
        report = Pipeline.from_spec(spec).run(progress=progress)
    typer.echo(render(report))
    typer.echo("")
    places = {"base": spec.base.model}
    places |= {f"expert {name}": expert.ref.model for name, expert in spec.experts.items()}
    for name, task in spec.tasks.items():
        for what, part in (("head", task.head), ("calibration", task.calibration), ("test", task.test)):
            if (lies := getattr(part, "path", None)) is not None:
                places[f"{what} {name}"] = str(lies)
    places["results"] = str(spec.output.path)
    places["spec to edit"] = str(path)
    places["run it again"] = f"merging pipeline run {path}"
    typer.echo(key_values(places))
    typer.echo("")
    typer.echo(report.checkpoint)
