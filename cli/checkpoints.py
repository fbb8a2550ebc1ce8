"""`merging inspect` and `merging compare`: what is in a checkpoint, and how far it is from its base."""

from __future__ import annotations

from typing import Annotated

import typer

from .output import print_json, print_text
from .pipeline import Quiet
from .progress import progress_to_stderr, size
from .render import key_values, table

INSPECT_EXAMPLE = "Example: merging inspect models/base"
COMPARE_EXAMPLE = "Example: merging compare models/base models/mnist"

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]


def inspect(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A folder or hub id.")],
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Tensors, dtypes, stacks of blocks, feeds and ties of a checkpoint."""
    from merging.inspection import inspect_checkpoint

    with progress_to_stderr(quiet=quiet) as progress:
        found = inspect_checkpoint(model, progress=progress)
    if as_json:
        print_json(found)
        return
    rows = [
        [tensor.name, " x ".join(map(str, tensor.shape)) or "scalar", tensor.dtype]
        for tensor in found.tensors
    ]
    print_text(table(["tensor", "shape", "dtype"], rows))
    totals = [
        [dtype, total.tensors, f"{total.elements:,}", size(total.bytes)]
        for dtype, total in found.totals.items()
    ]
    print_text(f"\n{table(['dtype', 'tensors', 'elements', 'size'], totals)}")
    facts = {"architecture": found.architecture or "unknown", "backbone": found.backbone or "none"}
    facts |= {f"stack {stack}": f"{blocks} blocks" for stack, blocks in found.stacks.items()}
    for stack, feeds in found.feeds.items():
        facts |= {f"feeds of {stack}": "; ".join(" + ".join(linears) for linears in feeds)}
    facts |= {"tied": "; ".join(" = ".join(names) for names in found.ties) or "nothing"}
    facts |= {f"note {number}": note for number, note in enumerate(found.notes, 1)}
    print_text(f"\n{key_values(facts)}")


def compare(
    base: Annotated[str, typer.Argument(metavar="BASE", help="A folder or hub id.")],
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="A folder or hub id of a model made from it.")
    ],
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Size and direction of the task vector, block by block, and what does not fit the base."""
    from merging.comparison import compare_checkpoints

    with progress_to_stderr(quiet=quiet) as progress:
        found = compare_checkpoints(base, model, progress=progress)
    if as_json:
        print_json(found)
        return
    rows = [
        [
            row.block,
            row.tensors,
            f"{row.base_norm:.4g}",
            f"{row.difference:.4g}",
            _optional(row.relative),
            _optional(row.cosine),
        ]
        for row in (*found.blocks, found.total)
    ]
    heads = ["block", "tensors", "base norm", "task vector", "relative", "cosine"]
    print_text(table(heads, rows))
    if found.misfits:
        misfits = [[misfit.tensor, misfit.kind, misfit.base, misfit.model] for misfit in found.misfits]
        heads = ["tensor", "", "base", "model"]
        print_text(f"\n{len(found.misfits)} misfits\n{table(heads, misfits, indent=2)}")


def _optional(value: float | None) -> str:
    return "-" if value is None else f"{value:.6f}"
