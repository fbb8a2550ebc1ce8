"""The suite `text-t5-8`: its tasks, and how its experts are trained."""

from __future__ import annotations

from benchmarks.suites.text import tasks
from benchmarks.suites.text.making import Recipe, suite_of
from benchmarks.suites.text.packages import BROWN, DJANGO, FORTUNES, MINILM, PYGMENTS, SPAM, VADER, WORDNET
from benchmarks.suites.text_t5 import base_model

RECIPE = Recipe(
    name="text-t5-8",
    summary="eight text tasks on a small T5",
    origin="The base has the word embeddings of MiniLM and was warmed up for this suite on other tasks than "
    "its eight. Experts are fine-tuned from it.",
    backbone="t5",
    tasks=(
        tasks.MOVIE,
        tasks.SPAM,
        tasks.SUPERSENSE,
        tasks.POS,
        tasks.GENRE,
        tasks.FORTUNE,
        tasks.CODE,
        tasks.TENSE,
    ),
    warm_up=(tasks.TWEETS, tasks.AMAZON, tasks.EDITORIALS, tasks.LANGUAGE),
    steps={
        "movie": 120,
        "spam": 120,
        "supersense": 300,
        "pos": 200,
        "genre": 200,
        "fortune": 250,
        "code": 200,
        "tense": 150,
    },
    prompt=lambda task: f"{task} : {{text}}",
    before="",
    max_length=40,
    batch=16,
    learning_rate=3e-4,
    adapter_rate=1e-3,
    base_job=base_model.base_job,
    base_facts={"sizes": base_model.SIZES, "warm_up": base_model.WARM_UP},
    packages=(MINILM, VADER, PYGMENTS, DJANGO, SPAM, BROWN, WORDNET, FORTUNES),
    needs=("peft",),
    version=1,
)

SUITE = suite_of(RECIPE)
