"""The suite `text-llama-6`: its tasks, and how its experts are trained."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from benchmarks.suites.text import tasks
from benchmarks.suites.text.making import Recipe, suite_of
from benchmarks.suites.text.packages import BROWN, PYGMENTS, SMOLLM2, SPAM, VADER, WORDNET
from benchmarks.suites.text.splits import Splits
from merging.demo.llm.texts import PROMPT
from merging.demo.packages import Archive
from merging.demo.side_by_side import Job


def base_job(
    recipe: Recipe,
    archives: Mapping[str, Archive],
    splits: Mapping[str, Splits],
    folder: Path,
    workshop: Path,
) -> Job:
    """The base of the demo's suite `llm`."""
    from merging.demo.llm.base_model import base_job as demo_base

    return demo_base(archives[SMOLLM2.name], folder)


RECIPE = Recipe(
    name="text-llama-6",
    summary="six text tasks on one language model",
    origin="The base is the first six blocks of SmolLM2: enough to learn a task in minutes, too few to "
    "write. Experts are fine-tuned from it for this suite.",
    backbone="llama",
    tasks=(tasks.MOVIE, tasks.SPAM, tasks.SUPERSENSE, tasks.CODE, tasks.GENRE, tasks.POS),
    steps={"movie": 120, "spam": 80, "supersense": 180, "code": 100, "genre": 120, "pos": 120},
    prompt=lambda task: PROMPT,
    before=" ",
    max_length=48,
    batch=16,
    learning_rate=2e-4,
    adapter_rate=5e-4,
    base_job=base_job,
    base_facts={"blocks": 6},
    packages=(SMOLLM2, VADER, PYGMENTS, SPAM, BROWN, WORDNET),
    needs=("gguf", "peft"),
    version=1,
)

SUITE = suite_of(RECIPE)
