"""Sufficiency: whether calibration examples are enough for what is solved with them, and not those of the
test."""

from __future__ import annotations

from collections.abc import Mapping

from merging.costs.sizes import Walk
from merging.data.hashing import shared_examples
from merging.data.task import Task
from merging.errors import Problem
from merging.preflight import Finding

FEW = 0.01  # of the test examples of a task


def overlap_findings(tasks: Mapping[str, Task]) -> list[Finding]:
    """Tasks of which test examples are calibration examples too, by what the model sees of them.

    Single ones are met in honest splits: data repeat themselves, and texts that are cut short become alike.
    They can move the score by their share at most, and only warn."""
    findings = []
    for name, shared in shared_examples(tasks).items():
        test = tasks[name].test
        assert test is not None
        others = [f'"{task}"' for task in shared.tasks if task != name]
        of = f" of task {' and '.join(others)}" if others and name not in shared.tasks else ""
        what = (
            f"{shared.examples} of {len(test)} test examples are calibration examples{of} too, "
            "so its score would flatter"
        )
        problem = Problem(f"tasks.{name}", what, "Draw the two from different splits.")
        findings.append(Finding("overlap", problem, stops=shared.examples > FEW * len(test)))
    return findings


def token_findings(walk: Walk) -> list[Finding]:
    """Feeds with more features than the examples have tokens, at most, for methods that solve them."""
    short = [
        (feed.inputs, walk.examples * block.tokens)
        for block in walk.blocks
        for feed in block.feeds
        if block.tokens and feed.inputs > walk.examples * block.tokens
    ]
    if not short:
        return []
    features, tokens = max(short, key=lambda pair: pair[0] / pair[1])
    enough = -(-features * walk.examples // tokens)
    what = (
        f"the {walk.examples} calibration examples of all tasks have {tokens} tokens at most, for up to "
        f"{features} features: what they do not tell is taken from the merged model"
    )
    remedy = f"Use {enough} examples or more, over all tasks."
    return [Finding("few_examples", Problem("tasks", what, remedy), stops=False)]
