"""Mutated specs, headers, indexes, adapter configs, files beside weights: done or a clear error, no more."""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.faults import mutations, workshop
from benchmarks.faults.fuzz_files import KINDS, Files
from benchmarks.faults.watch import Outcome, watched
from benchmarks.section import Found, table

_MERGES: tuple[dict[str, Any], ...] = (
    {"type": "average"},
    {"type": "task_arithmetic", "scale": 0.3},
    {"type": "ties", "density": 0.3},
    {"type": "dare_ties", "density": 0.5, "scale": 0.4},
    {"type": "della", "density": 0.5},
    {"type": "breadcrumbs", "density": 0.8},
    {"type": "sce", "density": 0.5},
    {"type": "iso_c", "scale": 1.0},
    {"type": "tsv_m"},
    {"type": "regmean", "shrink": 0.9},
    {"type": "task_arithmetic", "layers": [{"match": "*norm*", "scale": 0.1}]},
)
_MORE: tuple[dict[str, Any], ...] = (  # parts of the spec that the workshop's own does not have
    {},
    {"memory": "2GB"},
    {"precision": "mixed"},
    {"seed": 3},
    {"notes": "a note"},
    {"allow": ["nonfinite"]},
    {"backbone": {"type": "auto"}},
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--specs", type=int, default=2000, help="specs, one in 20 is also run (2000)")
    parser.add_argument("--headers", type=int, default=500, help="headers and indexes of weights (500)")
    parser.add_argument("--adapters", type=int, default=200, help="adapter_config.json (200)")
    parser.add_argument("--files", type=int, default=200, help="of each kind of file beside weights (200)")


@dataclass
class Tally:
    """Of one kind of input."""

    kinds: Counter[str] = field(default_factory=Counter)
    slowest: float = 0.0
    faults: list[str] = field(default_factory=list)

    def add(self, about: str, outcome: Outcome) -> None:
        self.kinds[outcome.kind] += 1
        self.slowest = max(self.slowest, outcome.seconds)
        if outcome.kind == "fault":
            self.faults.append(f"{about}: {outcome.what}")
            print(self.faults[-1], file=sys.stderr, flush=True)


def measured(options: argparse.Namespace) -> Found:
    workshop.settle(options.work)
    bench = Bench(options.work)
    tallies = bench.all(options.seed, options.specs, options.headers, options.adapters)
    tallies |= files(options.work / "files", options.seed, options.files)
    faults = [f"{name}: {fault}" for name, tally in tallies.items() for fault in tally.faults]
    return Found("Mutated inputs", _body(tallies), faults=faults)


class Bench:
    """Good inputs of three backbones, and what is made of them."""

    def __init__(self, folder: Path) -> None:
        """`workshop.settle` must have been called for the folder."""
        self.folder = folder
        self.good = {}
        for backbone in workshop.BACKBONES:
            workshop.models(folder / backbone, backbone, adapter=True)
            self.good[backbone] = workshop.spec(folder / backbone, backbone)
        from merging.spec import schema

        self.keys = sorted(_names(schema()))

    def all(self, seed: int, specs: int, headers: int, adapters: int) -> dict[str, Tally]:
        return {
            "specs, validated": self.specs(random.Random(f"{seed} specs"), specs),
            "specs, run": self.runs(random.Random(f"{seed} runs"), specs // 20),
            "headers and indexes": self.headers(random.Random(f"{seed} headers"), headers),
            "adapter configs": self.adapters(random.Random(f"{seed} adapters"), adapters),
        }

    def specs(self, chance: random.Random, count: int) -> Tally:
        """Through what `merging pipeline validate` calls."""
        tally = Tally()
        for number in range(count):
            place = self._spec(chance, number)
            outcome = watched(partial(_validated, place), self._allowed())
            tally.add(f"spec {number}", outcome)
            self._tidy(place, outcome)
        return tally

    def runs(self, chance: random.Random, count: int) -> Tally:
        """Through a whole run, into a folder that is given."""
        tally, out = Tally(), self.folder / "out"
        for number in range(count):
            place = self._spec(chance, number, most=1)
            shutil.rmtree(out, ignore_errors=True)
            outcome = watched(partial(_run, place, out), [out, *self._allowed()])
            tally.add(f"run {number}", outcome)
            self._tidy(place, outcome)
        return tally

    def headers(self, chance: random.Random, count: int) -> Tally:
        """As an expert of a spec that is validated; if it passes, every tensor is read."""
        tally = Tally()
        for number in range(count):
            backbone = chance.choice(workshop.BACKBONES)
            with self._copy(self.folder / backbone / workshop.TASKS[1]) as place:
                if chance.random() < 0.3:
                    self._spoil_index(place, chance)
                else:
                    file = place / "model.safetensors"
                    file.write_bytes(header(file.read_bytes(), chance))
                outcome = self._opened(backbone, str(place))
            tally.add(f"header {number} ({backbone})", outcome)
        return tally

    def adapters(self, chance: random.Random, count: int) -> Tally:
        """As an expert of a spec that is validated; if it passes, every tensor is read."""
        tally = Tally()
        for number in range(count):
            backbone = chance.choice(workshop.BACKBONES)
            with self._copy(self.folder / backbone / "adapter") as place:
                file = place / "adapter_config.json"
                if chance.random() < 0.15:
                    file.write_bytes(mutations.damaged(file.read_bytes(), chance))
                else:
                    good = json.loads(file.read_bytes())
                    file.write_text(mutations.text_of(mutations.mutated(good, chance, list(good), most=2)))
                outcome = self._opened(backbone, {"adapter": str(place)})
            tally.add(f"adapter {number} ({backbone})", outcome)
        return tally

    def _spec(self, chance: random.Random, number: int, most: int = 3) -> Path:
        most = most if chance.random() < 0.5 else 1
        good = {**self.good[chance.choice(workshop.BACKBONES)], **chance.choice(_MORE)}
        good["merge"] = chance.choice(_MERGES)
        if chance.random() < 0.3:
            good["calibrate"] = [{"type": "featcal", "ridge": 0.1}]
        if chance.random() < 0.4:
            del good["calibrate"]
        kind = chance.random()
        ending = "yaml" if kind > 0.85 else "json"
        place = self.folder / f"spec-{number}.{ending}"
        if kind < 0.15:
            content = mutations.damaged(json.dumps(good, indent=1).encode(), chance)
        else:
            content = mutations.text_of(mutations.mutated(good, chance, self.keys, most)).encode()
        place.write_bytes(content)
        return place

    def _opened(self, backbone: str, expert: Any) -> Outcome:
        from merging.pipeline import Pipeline

        good = self.good[backbone]
        asked = {**good, "experts": {**good["experts"], workshop.TASKS[1]: expert}}

        def action() -> None:
            pipeline = Pipeline.from_spec(asked)
            pipeline.validate()
            source = pipeline.resolve().models.experts[workshop.TASKS[1]]
            for name in source.names():
                source.read(name)

        return watched(action, self._allowed())

    def _spoil_index(self, place: Path, chance: random.Random) -> None:
        """Cut the weights in two files with an index, and spoil that."""
        from safetensors.torch import load_file, save_file

        tensors = load_file(place / "model.safetensors")
        names = sorted(tensors)
        halves = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
        for file, held in halves.items():
            save_file({name: tensors[name].clone() for name in held}, place / file, {"format": "pt"})
        (place / "model.safetensors").unlink()
        placed = {name: file for file, held in halves.items() for name in held}
        index = {"metadata": {"total_size": 1}, "weight_map": placed}
        target = place / "model.safetensors.index.json"
        if chance.random() < 0.3:
            target.write_bytes(mutations.damaged(json.dumps(index).encode(), chance))
        else:
            target.write_text(mutations.text_of(mutations.mutated(index, chance, ["weight_map", *halves])))

    @contextmanager
    def _copy(self, source: Path) -> Iterator[Path]:
        place = self.folder / "spoilt"
        shutil.copytree(source, place)
        try:
            yield place
        finally:
            shutil.rmtree(place)

    def _allowed(self) -> list[Path]:
        return [self.folder / "cache", self.folder / "tmp"]

    def _tidy(self, place: Path, outcome: Outcome) -> None:
        """A spec with a fault is kept, to be looked at."""
        if outcome.kind == "fault":
            place.rename(place.with_name(f"fault-{place.name}"))
        else:
            place.unlink()


def files(folder: Path, seed: int, count: int) -> dict[str, Tally]:
    """Files beside weights, by kind."""
    bench, tallies = Files(folder), {}
    for kind in KINDS:
        chance, tallies[kind] = random.Random(f"{seed} {kind}"), Tally()
        for number in range(count):
            tallies[kind].add(f"{kind} {number}", bench.outcome(kind, chance, number))
    return tallies


def header(content: bytes, chance: random.Random) -> bytes:
    """A safetensors file whose header is changed: its JSON, its length, or single bytes of it."""
    length = int.from_bytes(content[:8], "little")
    text, data = content[8 : 8 + length], content[8 + length :]
    kind = chance.random()
    if kind < 0.55:
        text = mutations.text_of(
            mutations.mutated(json.loads(text), chance, ["shape", "dtype", "data_offsets", "__metadata__"])
        ).encode()
    elif kind < 0.8:
        text = mutations.damaged(text, chance)
    elif kind < 0.9:
        return content[: chance.randint(0, len(content))]
    else:
        told = chance.choice((0, 1, 7, length - 1, length + 8, len(content), 10**8, 2**31, 2**63, 2**64 - 1))
        return told.to_bytes(8, "little") + text + data
    return len(text).to_bytes(8, "little") + text + data


def _validated(spec: Path) -> None:
    from merging.pipeline import Pipeline

    Pipeline.from_spec(spec).validate()


def _run(spec: Path, out: Path) -> None:
    from merging.pipeline import Pipeline

    Pipeline.from_spec(spec).run(out)


def _names(schema: Any) -> set[str]:
    """Every property's name in a JSON Schema."""
    if isinstance(schema, list):
        return set().union(*map(_names, schema)) if schema else set()
    if not isinstance(schema, dict):
        return set()
    own = set(schema["properties"]) if isinstance(schema.get("properties"), dict) else set()
    return own.union(*map(_names, schema.values()))


def _body(tallies: dict[str, Tally]) -> Sequence[str]:
    kinds = sorted({kind for tally in tallies.values() for kind in tally.kinds} - {"done", "fault"})
    rows = [
        [
            name,
            str(tally.kinds.total()),
            str(tally.kinds["done"]),
            *(str(tally.kinds[kind]) for kind in kinds),
            str(tally.kinds["fault"]),
            f"{tally.slowest:.2f}",
        ]
        for name, tally in tallies.items()
    ]
    heads = ["inputs", "all", "accepted", *(f"`{kind}`" for kind in kinds), "faults", "slowest, s"]
    told = (
        "A fault is an exception of any other kind, more than 10 s of the processor, more than 600 MiB of "
        "memory, a connection, a process started, or anything written outside the folder of the run, the "
        "cache and that of temporary files."
    )
    return [table(heads, rows), told]
