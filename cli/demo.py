"""`merging demo`: real experts, merged, calibrated and measured, and a spec to go on from."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from pathlib import Path
from typing import Annotated

import typer

from merging.demo import SUITES, build
from merging.errors import SpecError
from merging.working_folder import working_folder

from .output import print_text, say
from .progress import progress_to_stderr

EXAMPLE = "Example: merging demo --suite llm"
DEFAULT = "vision"
_SUITES = "; ".join(f"{suite.name}: {suite.summary}" for suite in SUITES.values())


def demo(
    suite: Annotated[str, typer.Option(metavar="NAME", help=f"Which experts. {_SUITES}.")] = DEFAULT,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            show_default=False,
            help=f"Folder of the demo; merging-demo-NAME if not given, merging-demo for {DEFAULT}.",
        ),
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress on stderr.")] = False,
) -> None:
    """Build small real experts (or find them in the cache), merge, calibrate and measure them."""
    from merging.registry import did_you_mean

    if suite not in SUITES:
        raise SpecError(f'there is no demo suite "{suite}"', remedy=did_you_mean(suite, SUITES))
    out = out or Path("merging-demo" if suite == DEFAULT else f"merging-demo-{suite}")
    if not out.is_absolute():
        working_folder()  # which may be gone
    say(f"demo: {SUITES[suite].summary}, in {out}/")
    with progress_to_stderr(quiet=quiet) as progress:
        path = build(out, SUITES[suite], progress=progress)
    from merging.pipeline import Pipeline
    from merging.report.table import render
    from merging.spec import load_spec

    from .render import key_values

    spec = load_spec(path)
    with progress_to_stderr(quiet=quiet) as progress:
        report = Pipeline.from_spec(spec).run(progress=progress)
    print_text(render(report))
    print_text("")
    places = {"base": spec.base.model}
    places |= {f"expert {name}": expert.ref.model for name, expert in spec.experts.items()}
    for name, task in spec.tasks.items():
        for what, part in (("head", task.head), ("calibration", task.calibration), ("test", task.test)):
            if (lies := getattr(part, "path", None)) is not None:
                places[f"{what} {name}"] = str(lies)
    places["results"] = str(spec.output.path)
    places["spec to edit"] = str(path)
    places["run it again"] = f"{this_command()} pipeline run {shlex.quote(str(path))}"
    print_text(key_values(places))
    print_text("")
    print_text(report.checkpoint)


def this_command() -> str:
    """What to type for this command: its name where that finds it, else its path."""
    started = Path(sys.argv[0])
    if started.name != "merging":
        return f"{shlex.quote(sys.executable)} -m merging"
    found = shutil.which("merging")
    if found is not None and os.path.realpath(found) == os.path.realpath(started):
        return "merging"
    return shlex.quote(str(started))
