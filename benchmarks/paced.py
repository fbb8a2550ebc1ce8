"""A run whose machine is measured while it goes: `python -m benchmarks.paced SPEC STAGE [--toy]`.

A shared machine is now fast, now slow. Between steps of the sweep this takes the rate of a float32 product,
several times a minute, and prints as JSON the stage's seconds without these pauses, the rate that the machine
had over them, and how far it went up and down.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

EVERY = 12.0  # seconds


@dataclass
class Pace:
    """The progress of a run, and the machine's rate along with it."""

    toy: bool
    every: float = EVERY
    rates: list[tuple[float, float]] = field(default_factory=list)  # seconds since the one before, rate
    paused: float = 0.0
    _last: float = 0.0

    def __call__(self, stage: str, done: int, total: int) -> None:
        if stage == "sweep" and (done in (0, total) or time.perf_counter() - self._last >= self.every):
            self.take()

    def take(self) -> None:
        from benchmarks.rates import rates

        start = time.perf_counter()
        rate = rates(toy=self.toy, kinds=("float32",), repeats=2)["float32"]
        self.rates.append((start - self._last if self.rates else 0.0, rate))
        self._last = time.perf_counter()
        self.paused += self._last - start

    def rate(self) -> float:
        """Operations a second over the whole time: each stretch at the mean of the rates at its ends."""
        ends = [rate for _, rate in self.rates]
        stretches = [seconds for seconds, _ in self.rates[1:]]
        if not sum(stretches):
            return max(ends)
        means = [(one + other) / 2 for one, other in pairwise(ends)]
        return sum(s * mean for s, mean in zip(stretches, means, strict=True)) / sum(stretches)


def main(words: Sequence[str]) -> None:
    from merging import Pipeline

    spec, stage = Path(words[0]), words[1]
    pace = Pace(toy="--toy" in words)
    report = Pipeline.from_spec(spec).run(progress=pace)
    seconds = next(one.seconds for one in report.stages if one.name == stage) - pace.paused
    rates = [rate for _, rate in pace.rates]
    found = {"seconds": seconds, "rate": pace.rate(), "slowest": min(rates), "fastest": max(rates)}
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1:])
