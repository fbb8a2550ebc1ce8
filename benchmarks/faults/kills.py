"""Runs stopped at random moments by SIGKILL, SIGTERM and SIGINT, looked at, and run again to their end."""

from __future__ import annotations

import argparse
import random
import shutil
import signal
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.faults import folders, workshop
from benchmarks.faults.forge import Blow, Ended, command, entry, steps
from benchmarks.section import Found, table

_NAMES = {signal.SIGKILL: "SIGKILL", signal.SIGTERM: "SIGTERM", signal.SIGINT: "SIGINT"}
_CODES = {signal.SIGTERM: 143, signal.SIGINT: 130}  # with which the command answers them


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--kills", type=int, default=200, help="how many runs are struck at (200)")
    parser.add_argument(
        "--backbones", nargs="+", choices=workshop.BACKBONES, default=list(workshop.BACKBONES), metavar="NAME"
    )


@dataclass
class Tally:
    """Of one backbone."""

    stopped: Counter[str] = field(default_factory=Counter)
    finished: int = 0  # before the blow fell
    unstarted: int = 0  # ended by the signal itself, before the command could answer it or begin anything
    resumed: int = 0
    faults: list[str] = field(default_factory=list)


def measured(options: argparse.Namespace) -> Found:
    workshop.settle(options.work)
    chance = random.Random(options.seed)
    grounds = [Ground(options.work / name, name) for name in options.backbones]
    tallies = {ground.backbone: Tally() for ground in grounds}
    for number in range(options.kills):
        ground = grounds[number % len(grounds)]
        tally = tallies[ground.backbone]
        before = len(tally.faults)
        ground.strike(number, chance, tally)
        for fault in tally.faults[before:]:
            print(f"{ground.backbone}, kill {number}: {fault}", file=sys.stderr, flush=True)
    faults = [f"{name}: {fault}" for name, tally in tallies.items() for fault in tally.faults]
    return Found("Runs killed at random moments", _body(tallies), faults=faults)


class Ground:
    """One backbone: its models, its two undisturbed runs, and folders in which runs are stopped."""

    def __init__(self, folder: Path, backbone: str) -> None:
        entry()
        self.folder, self.backbone = folder, backbone
        workshop.models(folder, backbone)
        asked = {"whole": workshop.spec(folder, backbone)}
        asked["earlier"] = workshop.spec(
            folder, backbone, merge={"type": "average"}, output={"shard_size": "5GB"}
        )
        specs = {name: workshop.written(folder / f"{name}.json", spec) for name, spec in asked.items()}
        self.words = ["pipeline", "run", str(specs["whole"]), "--overwrite", "--quiet", "--out"]
        from merging.pipeline import Pipeline

        for name, spec in specs.items():  # here, so that no child has to import anything
            Pipeline.from_spec(spec).run(folder / name)
        folders.put(folder / "earlier", folders.USERS)
        self.whole, self.earlier = (folders.results(folder / name) for name in ("whole", "earlier"))
        self.made = folders.files(folder / "whole")
        self.steps, self.seconds = {}, {}
        for scene in ("fresh", "replacing"):
            out = self._out(scene)
            self.seconds[scene] = command([*self.words, str(out)]).seconds
            self.steps[scene] = steps([*self.words, str(self._out(scene))])

    def strike(self, number: int, chance: random.Random, tally: Tally) -> None:
        """Stop a run, and perhaps the one that goes on with it; then let one come to its end."""
        scene = ("fresh", "replacing")[chance.random() < 0.5]
        out, users = self._out(scene), self._users(scene)
        blows = 1
        while blows:
            blows -= 1
            blow, before = self._blow(scene, chance), folders.files(out)
            ended = command([*self.words, str(out)], blow)
            name, how = _NAMES[blow.sign], "step" if blow.at is not None else "moment"
            about = (
                f"{scene}, {name} at {how} {blow.at if blow.at is not None else round(blow.after or 0, 3)}"
            )
            found = self._faults(ended, blow, out, users, before)
            tally.faults += [f"{about}: {fault}" for fault in found]
            if ended.code == 0:
                tally.finished += 1
            elif _unstarted(ended, blow, before, folders.files(out)):
                tally.unstarted += 1
            else:
                tally.stopped[f"{name} at a {how}"] += 1
                blows += chance.random() < 0.2
        last = command([*self.words, str(out)])
        wrong = [
            *folders.different(out, self.whole),
            *folders.stray(out, self.made, users),
            *folders.lost(out, users, moved=False),
        ]
        if last.code:
            wrong.insert(0, f"the next run ended with {last.code}: {last.said[-300:]}")
        tally.resumed += not wrong
        tally.faults += [f"{about}, then run again: {fault}" for fault in wrong]
        shutil.rmtree(out)

    def _faults(
        self, ended: Ended, blow: Blow, out: Path, users: folders.Files, before: folders.Files
    ) -> list[str]:
        found = [*folders.unfinished(out, self.whole, self.earlier), *folders.lost(out, users, moved=True)]
        expected = {0, -signal.SIGKILL if blow.sign == signal.SIGKILL else _CODES[blow.sign]}
        unstarted = _unstarted(ended, blow, before, folders.files(out))
        if (ended.code not in expected and not unstarted) or ended.hung:
            found.append(f"it ended with {ended.code} after {ended.seconds:.1f} s: {ended.said[-300:]}")
        if "Traceback" in ended.said:
            found.append(f"it showed a traceback: {ended.said[-600:]}")
        return found

    def _blow(self, scene: str, chance: random.Random) -> Blow:
        sign = chance.choices(list(_NAMES), weights=(70, 15, 15))[0]
        if chance.random() < 0.5:
            return Blow(sign, after=chance.uniform(0, self.seconds[scene]))
        return Blow(sign, at=chance.randint(1, self.steps[scene]))

    def _out(self, scene: str) -> Path:
        """A folder to run in: with the user's files alone, or with results of another spec among them."""
        out = self.folder / "out"
        shutil.rmtree(out, ignore_errors=True)
        if scene == "replacing":
            shutil.copytree(self.folder / "earlier", out)
        else:
            folders.put(out, self._users(scene))
        return out

    @staticmethod
    def _users(scene: str) -> folders.Files:
        if scene == "replacing":
            return folders.USERS
        return {
            name: content
            for name, content in folders.USERS.items()
            if name.split("/")[0] not in (*folders.STAGES, "heads")
        }


def _unstarted(ended: Ended, blow: Blow, before: folders.Files, after: folders.Files) -> bool:
    """Whether SIGTERM or SIGINT ended the process itself, before it answered signals, and with nothing said,
    and no file written or changed."""
    itself = blow.sign != signal.SIGKILL and ended.code == -blow.sign
    return itself and not (ended.began or ended.hung or ended.said) and dict(before) == dict(after)


def _body(tallies: dict[str, Tally]) -> Sequence[str]:
    kinds = sorted({kind for tally in tallies.values() for kind in tally.stopped})
    rows = [
        [
            f"`{name}`",
            *(str(tally.stopped[kind]) for kind in kinds),
            str(tally.unstarted),
            str(tally.finished),
            str(tally.resumed),
            str(len(tally.faults)),
        ]
        for name, tally in tallies.items()
    ]
    counts = ["before start", "finished before", "run again to the same bytes", "faults"]
    heads = ["backbone", *kinds, *counts]
    told = (
        "A moment is a random time within the run; a step is a random one of its calls that open, write, "
        "sync, move or remove a file. Half of the runs replace the results of another spec. Before start: "
        "the signal ended the process before the command could answer it, and nothing was said or written. "
        "After each stop: nothing looks finished that is not, and the user's files are what they were. After "
        "the next run: every result has the bytes of the undisturbed run, and nothing is left behind."
    )
    return [table(heads, rows), told]
