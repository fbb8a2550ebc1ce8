"""`merging verify`: whether a result, and what it was made from, is still what the manifest says."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .output import print_json, print_text
from .render import table

if TYPE_CHECKING:
    from merging.verifying import Verified, VerifiedGroup

_TOLD = ("changed", "missing", "added")
VERIFY_EXAMPLE = "Example: merging verify out"


def verify(
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The folder of a run, or one checkpoint in it.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Hash every file anew that a run read or wrote; exit 0 if all are unchanged, 1 if not."""
    from merging.verifying import verify

    found = verify(out)
    if as_json:
        print_json(found)
    else:
        rows = [_row(group) for group in found.groups if group.files]
        print_text(table(["what", "files", "state", "model", "revision"], rows))
        differing = [[one.state, one.path] for group in found.groups for one in group.differing]
        print_text("")
        if differing:
            unique = [list(row) for row in dict.fromkeys(map(tuple, differing))]
            print_text(f"{len(unique)} files are not what they were\n{table(['', 'file'], unique, indent=2)}")
        else:
            print_text("unchanged: all files are what they were")
        print_text(_against(found))
        for note in found.notes:
            print_text(f"note: {note}")
    if not found.unchanged:
        raise typer.Exit(1)


def _against(found: Verified) -> str:
    """By which manifests, within the folder as far as they lie in it."""
    manifests = dict.fromkeys(Path(group.manifest) for group in found.groups if group.manifest)
    if not manifests:
        return "compared to nothing: no manifest is left"
    folder = Path(found.folder)
    names = [str(one.relative_to(folder) if one.is_relative_to(folder) else one) for one in manifests]
    return f"compared to {', '.join(names)}"


def _row(group: VerifiedGroup) -> list[object]:
    states = [file.state for file in group.files]
    told = ", ".join(f"{states.count(state)} {state}" for state in _TOLD if state in states)
    return [group.what, len(states), told or "unchanged", group.model or "-", group.revision or "-"]
