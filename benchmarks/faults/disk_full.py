"""Runs that meet a full disk at points over all bytes that they write, looked at, and run again with room."""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.faults import folders, workshop
from benchmarks.faults.forge import PEACE, command, entry, steps
from benchmarks.section import Found, table

_PAGE, _DISK = 4096, 1 << 24
_BACKBONES = ("clip_vision", "llama")
_USERS = {"notes.txt": folders.USERS["notes.txt"]}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--points", type=int, default=50, help="how many sizes are tried in all (50)")


@dataclass
class Tally:
    """Of one backbone and one kind of limit."""

    stopped: int = 0
    finished: int = 0  # the limit was large enough
    resumed: int = 0
    said: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)


def measured(options: argparse.Namespace) -> Found:
    workshop.settle(options.work)
    entry()
    tallies: dict[tuple[str, str], Tally] = {}
    with small_disk(options.work / "disk", _DISK) as mounted:
        kinds = ["no file may grow"] + (["little room", "room used up"] if mounted else [])
        share = max(1, -(-options.points // (len(kinds) * len(_BACKBONES))))
        for backbone in _BACKBONES:
            case = _Case(options.work / backbone, backbone)
            for kind in kinds:
                tally = tallies[backbone, kind] = Tally()
                for point in range(share):
                    if kind == "no file may grow":
                        case.no_growth(point, share, tally)
                    elif kind == "little room":
                        case.little_room(options.work / "disk", point, share, tally)
                    else:
                        case.used_up(options.work / "disk", point, share, tally)
    facts = [] if mounted else ["no small disk could be mounted (needs root): files were limited alone"]
    faults = [f"{backbone}: {fault}" for (backbone, _), tally in tallies.items() for fault in tally.faults]
    return Found("Full disks", _body(tallies), facts, faults)


class _Case:
    """One backbone: its models and its undisturbed run."""

    def __init__(self, folder: Path, backbone: str) -> None:
        self.folder = folder
        workshop.models(folder, backbone)
        spec = workshop.written(folder / "spec.json", workshop.spec(folder, backbone))
        self.words = ["pipeline", "run", str(spec), "--overwrite", "--quiet", "--out"]
        from merging.pipeline import Pipeline

        Pipeline.from_spec(spec).run(folder / "whole")
        self.whole, self.made = folders.results(folder / "whole"), folders.files(folder / "whole")
        out = self._out(folder / "out")
        self.steps = steps([*self.words, str(out)])

    def no_growth(self, point: int, points: int, tally: Tally) -> None:
        """From a step on, not one byte more can be written to any file (RLIMIT_FSIZE)."""
        full = self._step(point, points)

        def act(step: int) -> None:
            if step == full:
                resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))

        out = self._out(self.folder / "out")
        self._judge(f"no growth from step {full} on", out, act, lambda: None, tally)

    def little_room(self, disk: Path, point: int, points: int, tally: Tally) -> None:
        """The disk has room for a share of all bytes that the run writes."""
        needed = sum(-(-len(content) // _PAGE) * _PAGE for content in self.made.values())
        room = needed * (point + 1) // (points + 1)
        out = self._out(disk / "out")
        used = os.statvfs(disk)
        resize(disk, (used.f_blocks - used.f_bfree) * used.f_frsize + room // _PAGE * _PAGE)
        self._judge(f"a disk with {room} bytes free", out, None, lambda: resize(disk, _DISK), tally)

    def used_up(self, disk: Path, point: int, points: int, tally: Tally) -> None:
        """At a step, somebody else fills the disk."""
        full, filler = self._step(point, points), disk / "filler"

        def act(step: int) -> None:
            if step == full:
                _fill(filler)

        out = self._out(disk / "out")
        self._judge(f"a disk that is full from step {full} on", out, act, filler.unlink, tally)

    def _step(self, point: int, points: int) -> int:
        return 1 + self.steps * point // points

    def _out(self, out: Path) -> Path:
        shutil.rmtree(out, ignore_errors=True)
        folders.put(out, _USERS)
        return out

    def _judge(
        self,
        about: str,
        out: Path,
        act: Callable[[int], Any] | None,
        make_room: Callable[[], Any],
        tally: Tally,
    ) -> None:
        ended = command([*self.words, str(out)], PEACE, act)
        wrong = [*folders.unfinished(out, self.whole), *folders.lost(out, _USERS, moved=False)]
        if ended.code == 0:
            tally.finished += 1
        else:
            tally.stopped += 1
            wrong += _unclear(ended.code, ended.said)
            tally.said[_shape(ended.said, out)] += 1
        make_room()
        last = command([*self.words, str(out)])
        after = [
            *folders.different(out, self.whole),
            *folders.stray(out, self.made, _USERS),
            *folders.lost(out, _USERS, moved=False),
        ]
        if last.code:
            after.insert(0, f"the next run ended with {last.code}: {last.said[-300:]}")
        tally.resumed += not after
        faults = [f"{about}: {fault}" for fault in [*wrong, *(f"then with room: {one}" for one in after)]]
        for fault in faults:
            print(fault, file=sys.stderr, flush=True)
        tally.faults += faults
        shutil.rmtree(out)


def _unclear(code: int, said: str) -> list[str]:
    """What is wrong with how the command told of it: one error, exit 1 or 2, no room named as the cause."""
    found = []
    if code not in (1, 2):
        found.append(f"it ended with {code}")
    if said.count("error:") != 1 or "Traceback" in said or "unexpected" in said:
        found.append(f"not one clear error: {said[-400:]}")
    elif not any(word in said.lower() for word in ("no room", "no space", "too large", "bytes free", "free")):
        found.append(f"the error does not say that there was no room: {said[-400:]}")
    return found


def _shape(said: str, out: Path) -> str:
    """The error's first words, without places and numbers."""
    line = next((line for line in said.splitlines() if "error:" in line), said[:80]).replace(str(out), "OUT")
    return "".join("#" if character.isdigit() else character for character in line)[:110]


def _fill(place: Path) -> None:
    """Take all room that is left."""
    descriptor = os.open(place, os.O_WRONLY | os.O_CREAT)
    try:
        while True:
            os.write(descriptor, bytes(1 << 16))
    except OSError:
        pass
    finally:
        os.close(descriptor)


@contextmanager
def small_disk(place: Path, size: int) -> Iterator[bool]:
    """A disk in memory mounted at `place`, of so many bytes; false where this user may not mount one."""
    place.mkdir(parents=True, exist_ok=True)
    asked = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(place)]
    try:
        mounted = subprocess.run(asked, capture_output=True, check=False).returncode == 0
    except OSError:
        mounted = False
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.run(["umount", str(place)], check=False)


def resize(place: Path, size: int) -> None:
    """Give the mounted disk another size."""
    asked = ["mount", "-o", f"remount,size={max(size, _PAGE)}", str(place)]
    subprocess.run(asked, capture_output=True, check=True)


def _body(tallies: dict[tuple[str, str], Tally]) -> Sequence[str]:
    rows = [
        [
            f"`{backbone}`, {kind}",
            *(str(value) for value in (tally.stopped, tally.finished, tally.resumed, len(tally.faults))),
        ]
        for (backbone, kind), tally in tallies.items()
    ]
    heads = ["what is limited", "stopped", "had room enough", "run again to the same bytes", "faults"]
    told = (
        "No file may grow: from a step on, all writing fails (RLIMIT_FSIZE). Little room: a tmpfs of a "
        "share of the bytes that are needed. Room used up: a tmpfs that somebody fills at a step. Steps "
        "are the calls of the run that open, write, sync, move or remove a file, taken at equal "
        "distances. After each stop: one error that says what lacks room, nothing looks finished that is "
        "not, and the user's files are what they were. After the next run, with room: the bytes of the "
        "undisturbed run."
    )
    said: Counter[str] = Counter()
    for tally in tallies.values():
        said.update(tally.said)
    words = "\n".join(f"- {count} times: `{line}`" for line, count in said.most_common())
    return [table(heads, rows), told, words]
