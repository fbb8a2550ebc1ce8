"""One list of class names for a task: what the numbers of labels mean, whichever classes a split lacks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from merging.errors import Problem

if TYPE_CHECKING:
    from torch import Tensor

    from merging.data.task import Examples, LinearHead

_LABELLED = ("test", "validation")
_SHOWN = 12  # names in a message


def known_classes(splits: Mapping[str, Examples | None]) -> tuple[str, ...]:
    """The classes of a task, as its splits name them all together; `splits`: test, validation, calibration.

    A split that was numbered by what it holds may lack classes, so the names of all are put together; those
    of calibration examples only where they have names in common with the others, for unlabelled examples may
    lie in any folder."""
    given = {split: one for split, one in splits.items() if one is not None and one.classes}
    found = _found(given)
    if not found:
        return next((one.classes for one in given.values()), ())
    names = {name for one in found.values() for name in one.classes}
    for one in given.values():
        if not one.found_classes and names <= set(one.classes):
            return one.classes
    calibration = given.get("calibration")
    if calibration is not None and calibration.found_classes and names & set(calibration.classes):
        names |= set(calibration.classes)
    return tuple(sorted(names))


def number_alike_(task: str, splits: Mapping[str, Examples | None], head: LinearHead) -> list[Problem]:
    """Give labels that were numbered by the names of one split the numbers of the head's rows.

    A problem where it is not sure which row a name stands for: there are more or fewer names than rows, and
    the head's own names do not say. A note where there are as many, and the head calls some otherwise."""
    given = {split: one for split, one in splits.items() if one is not None and one.classes}
    found = _found(given)
    if not found:
        return []
    tested = sorted({name for one in found.values() for name in one.classes})
    names = _by_the_head(tested, head.names) or known_classes(splits)
    if len(names) != head.shape[0]:
        return [_unsure(task, found, names, head)]
    _tell_strange_(task, found, names, head)
    _tell_order_(task, found, names, head)
    for split, one in given.items():
        if not one.found_classes or not set(one.classes) <= set(names):
            continue
        if split in found and (lacking := [name for name in names if name not in one.classes]):
            one.notes += (f'task "{task}": {split} data has nothing of class {_listed(lacking)}',)
        one.renumber_(names)
    return []


def renumbered(labels: Tensor, before: Sequence[str], after: Sequence[str]) -> Tensor:
    """Labels that are positions in `before`, as positions in `after`, which has all these names."""
    places = {name: place for place, name in enumerate(after)}
    return torch.tensor([places[before[label]] for label in labels.tolist()], dtype=labels.dtype)


def plain_name(name: str) -> str:
    """How names of folders, of a data set and of a head's classes are compared."""
    return name.lower().replace("_", " ").replace("-", " ").strip()


def _found(given: Mapping[str, Examples]) -> dict[str, Examples]:
    return {split: given[split] for split in _LABELLED if split in given and given[split].found_classes}


def _by_the_head(tested: Sequence[str], named: Sequence[str]) -> tuple[str, ...]:
    """The head's classes under the splits' spelling, where it has all of theirs and in the same order."""
    theirs, ours = [plain_name(name) for name in named], [plain_name(name) for name in tested]
    if len(set(theirs)) < len(theirs) or len(set(ours)) < len(ours) or not set(ours) <= set(theirs):
        return ()
    places = [theirs.index(name) for name in ours]
    if places != sorted(places):
        return ()
    spelt = dict(zip(places, tested, strict=True))
    return tuple(spelt.get(place, name) for place, name in enumerate(named))


def _unsure(task: str, found: Mapping[str, Examples], names: Sequence[str], head: LinearHead) -> Problem:
    split, one = next(iter(found.items()))
    folders = hasattr(one, "files")
    kind = "class folders" if folders else "classes"
    own = f"the {split} examples have {len(one.classes)} {kind} ({_listed(one.classes)})"
    if set(names) != set(one.classes):
        own += f", with the task's other examples {len(names)} ({_listed(names)})"
    rows = f"the head has {head.shape[0]} classes"
    rows += f" ({_listed(head.names)})" if head.names else ""
    remedy = (
        "Give each of the head's classes a folder, an empty one where there are no pictures."
        if folders
        else 'Name all of the head\'s classes in its order: "labels": ["...", "..."].'
    )
    what = f"{own}, {rows}: which class of the head each is cannot be told"
    return Problem(f"tasks.{task}.{split}", what, remedy)


def _tell_strange_(task: str, found: Mapping[str, Examples], names: Sequence[str], head: LinearHead) -> None:
    """Say which names the head does not have, and as which of its classes they count."""
    if len(head.names) != len(names):
        return
    known = {plain_name(name) for name in head.names}
    for split, one in found.items():
        own = set(one.classes)
        taken = [
            f"{ours} as {theirs}"
            for ours, theirs in zip(names, head.names, strict=True)
            if ours in own and plain_name(ours) not in known
        ]
        if taken:
            kind = "class folders" if hasattr(one, "files") else "classes"
            one.notes += (
                f'task "{task}": {split} data has {kind} of other names than the head has classes; they are '
                f"taken in their order: {_listed(taken)}. If that is wrong, name them as the head does.",
            )


def _tell_order_(task: str, found: Mapping[str, Examples], names: Sequence[str], head: LinearHead) -> None:
    """Say the order of names that are numbers, where sorted as text they stand otherwise than as numbers."""
    try:
        values = [float(name) for name in names]
    except ValueError:
        return
    if values == sorted(values) or [*map(plain_name, head.names)] == [*map(plain_name, names)]:
        return
    longest = max(map(len, names))
    for split, one in found.items():
        if hasattr(one, "files"):
            kind = "class folders"
            remedy = f"name them with as many digits each: {_listed(sorted(n.zfill(longest) for n in names))}"
        else:
            kind = "classes"
            ordered = ", ".join(f'"{name}"' for _, name in sorted(zip(values, names, strict=True)))
            remedy = f'say so: "labels": [{ordered}]'
        one.notes += (
            f'task "{task}": {split} data has {kind} that are numbers; they count as the head\'s classes in '
            f"the order of their text: {_listed(names)}. If the head was trained in that of the numbers, "
            f"{remedy}.",
        )


def _listed(names: Sequence[str]) -> str:
    more = ", ..." if len(names) > _SHOWN else ""
    return f"{', '.join(names[:_SHOWN])}{more}"
