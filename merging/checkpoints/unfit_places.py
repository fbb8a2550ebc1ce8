"""Whether a run can put its files where they belong, asked before it does anything."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

from merging.checkpoints.manifest import MANIFEST, listed_files
from merging.checkpoints.publish import check_target
from merging.errors import OutputError, Problem


def refuse_unfit_places(out: Path, names: Iterable[str]) -> None:
    """Raise OutputError, with all of them, where a file of ours cannot be put at OUT/name: a folder has its
    name, or a file or a link that leads out of OUT has that of a folder on the way."""
    found: dict[Path, str] = {}
    for name in names:
        for parent in reversed(PurePosixPath(name).parents[:-1]):
            place = out / parent
            if os.path.lexists(place) and not place.is_dir():
                found[place] = "is no folder, expected one: a run writes files into it"
            elif place.is_dir() and not place.resolve().is_relative_to(out.resolve()):
                found[place] = f"is a link that leads out of {out}, expected a folder"
        place = out / name
        if place.is_dir() and not place.is_symlink():
            found[place] = "is a folder, expected a file that a run writes"
    if found:
        raise OutputError(
            f"{out} holds things of another kind under names that a run needs",
            problems=[Problem(str(place), what) for place, what in found.items()],
            remedy="Move them away, or choose another output path.",
        )


def refuse_unfit_target(checkpoint: Path) -> None:
    """Raise OutputError where no checkpoint can be published there; changes nothing."""
    try:
        os.stat(checkpoint)
    except FileNotFoundError:
        pass
    except OSError as error:  # links in a ring
        raise OutputError(
            f"{checkpoint} cannot be looked at, expected a folder or nothing: {error.strerror}",
            remedy="Remove it, or choose another output path.",
        ) from error
    check_target(checkpoint.resolve())


def refuse_unlisted(checkpoint: Path, record: Path) -> None:
    """Raise OutputError where a checkpoint that a run began or made has no manifest any more by which its
    files could be told from the user's. `record`: the run's own copy of it."""
    if not checkpoint.is_dir() or listed_files(checkpoint) is not None:
        return
    present = sorted(path.name for path in checkpoint.iterdir())
    if not present:
        return
    shown = ", ".join(present[:3]) + (", ..." if len(present) > 3 else "")
    lost = "is damaged" if os.path.lexists(checkpoint / MANIFEST) else "is gone"
    raise OutputError(
        f"{checkpoint} holds {shown}, and its {MANIFEST} {lost}, without a copy in {record} that fits: "
        "nothing tells a run's files from yours",
        remedy=f"Put the manifest back; or move {checkpoint} away, then run again: it is made anew.",
    )
