"""Making a text suite: data, base, an expert and an adapter for each task, and one model of all tasks."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.suites.text.splits import MOST, Splits, apart, write_splits
from benchmarks.suites.text.tasks import TextTask
from benchmarks.suites.text.training import Lesson, Training, training_job
from merging.contracts.method import Progress
from merging.demo.llm.texts import write_texts
from merging.demo.packages import Archive, Package
from merging.demo.publishing import published
from merging.demo.side_by_side import Job, run_side_by_side
from merging.demo.suite import Suite

CALIBRATION_EXAMPLES = 256
"""How many the specs ask for; the files hold more."""

ADAPTER_SPEC = "spec-lora.json"
JOINT = "joint"

BaseJob = Callable[["Recipe", Mapping[str, Archive], Mapping[str, Splits], Path, Path], Job]


@dataclass(frozen=True)
class Recipe:
    """What decides a text suite, beside the readers' and the training's code, which `version` stands for.

    `steps`: for each task, of its expert and of its adapter; the joint model has their sum. `prompt(task)` is
    the template around a text, `before` what stands before an answer. `base_job` gives what makes the base in
    a folder; `warm_up`: tasks that it is for, none of which is among `tasks`.
    """

    name: str
    summary: str
    origin: str
    backbone: str
    tasks: tuple[TextTask, ...]
    steps: Mapping[str, int]
    prompt: Callable[[str], str]
    before: str
    max_length: int
    batch: int
    learning_rate: float
    adapter_rate: float
    base_job: BaseJob
    base_facts: Mapping[str, Any]
    packages: tuple[Package, ...]
    needs: tuple[str, ...]
    version: int
    warm_up: tuple[TextTask, ...] = ()
    seed: int = 0

    @property
    def parts(self) -> tuple[str, ...]:
        names = [task.name for task in self.tasks]
        models = [f"models/{name}" for name in ("base", *names, JOINT)]
        histories = [f"training/{name}.json" for name in (*names, *map(adapter_name, names), JOINT)]
        data = [f"data/{name}" for name in names]
        return (*models, *(f"adapters/{name}" for name in names), *data, *histories)

    def answers(self, task: TextTask) -> dict[str, str]:
        return {label: f"{self.before}{label}" for label in task.classes}

    def training(self, lessons: tuple[Lesson, ...], steps: int, form: str = "blocks") -> Training:
        return Training(
            lessons=lessons,
            max_length=self.max_length,
            steps=steps,
            batch=self.batch,
            learning_rate=self.adapter_rate if form == "lora" else self.learning_rate,
            form=form,
            seed=self.seed,
        )


def adapter_name(task: str) -> str:
    return f"{task}-lora"


def suite_of(recipe: Recipe) -> Suite:
    """Built by one command, as those of the demo are."""
    facts = {
        "version": recipe.version,
        "base": recipe.base_facts,
        "steps": recipe.steps,
        "rates": [recipe.learning_rate, recipe.adapter_rate],
        "batch": recipe.batch,
        "spec": spec_of(recipe),
        "most": MOST,
        "packages": [package.sha256 for package in recipe.packages],
    }
    return Suite(
        name=recipe.name,
        summary=recipe.summary,
        origin=recipe.origin,
        parts=recipe.parts,
        spec=spec_of(recipe),
        also={ADAPTER_SPEC: spec_of(recipe, adapters=True)},
        packages=recipe.packages,
        needs=recipe.needs,
        make=partial(make, recipe),
        recipe=json.dumps(facts, sort_keys=True),
    )


def spec_of(recipe: Recipe, *, adapters: bool = False) -> dict[str, Any]:
    """A spec with a merge rule that needs no settings, to be changed."""
    where = "adapters" if adapters else "models"
    experts: dict[str, Any] = {task.name: f"{where}/{task.name}" for task in recipe.tasks}
    if adapters:
        experts = {name: {"adapter": path} for name, path in experts.items()}
    return {
        "base": "models/base",
        "experts": experts,
        "backbone": {"type": recipe.backbone},
        "merge": {"type": "average"},
        "tasks": {task.name: _task_spec(recipe, task) for task in recipe.tasks},
        "seed": recipe.seed,
    }


def make(recipe: Recipe, made: Path, archives: Mapping[str, Archive], report: Progress) -> None:
    """Add to the folder `made` what it lacks. The model of all tasks is trained on all their lessons."""
    tasks = {task.name: task for task in (*recipe.tasks, *recipe.warm_up)}
    report("texts", 0, 1)
    splits = apart({name: task.texts(archives) for name, task in tasks.items()})
    report("texts", 1, 1)
    for task in recipe.tasks:
        if not (made / "data" / task.name).exists():
            with published(made / "data" / task.name) as making:
                write_splits(splits[task.name], making)
    with tempfile.TemporaryDirectory() as name:
        workshop = Path(name)
        base = made / "models" / "base"
        if not base.exists():
            job = recipe.base_job(recipe, archives, splits, base, workshop)
            run_side_by_side([job], partial(report, "base"))
        lessons = {task.name: lesson(recipe, task, splits[task.name], workshop) for task in recipe.tasks}
        # Experts first: a build that is stopped after them has what most comparisons need.
        for stage, wanted in (("experts", _experts), ("others", _others)):
            jobs = _jobs(wanted(recipe, lessons), made, workshop)
            run_side_by_side(jobs, partial(report, stage))


def lesson(recipe: Recipe, task: TextTask, splits: Splits, workshop: Path) -> Lesson:
    """A task's training and validation texts, written into `workshop`."""
    files = {part: workshop / f"{task.name}-{part}.jsonl" for part in ("train", "validation")}
    write_texts(splits["train"], files["train"], labelled=True)
    write_texts(splits["validation"], files["validation"], labelled=True)
    return Lesson(
        prompt=recipe.prompt(task.name),
        texts=str(files["train"]),
        answers=recipe.answers(task),
        validation=str(files["validation"]),
    )


def _experts(recipe: Recipe, lessons: Mapping[str, Lesson]) -> dict[str, Training]:
    return {f"models/{task}": recipe.training((its,), recipe.steps[task]) for task, its in lessons.items()}


def _others(recipe: Recipe, lessons: Mapping[str, Lesson]) -> dict[str, Training]:
    """The model of all tasks, and the adapters."""
    every = recipe.training(tuple(lessons.values()), sum(recipe.steps.values()))
    adapters = {
        f"adapters/{task}": recipe.training((its,), recipe.steps[task], form="lora")
        for task, its in lessons.items()
    }
    return {f"models/{JOINT}": every, **adapters}


def _jobs(wanted: Mapping[str, Training], made: Path, workshop: Path) -> list[Job]:
    """One for each folder that is not there yet."""
    jobs = []
    for folder, training in wanted.items():
        kind, name = folder.split("/")
        history = made / "training" / f"{adapter_name(name) if kind == 'adapters' else name}.json"
        if not (made / folder).exists():
            base = made / "models" / "base"
            jobs.append(training_job(f"{kind} {name}", training, base, made / folder, history, workshop))
    return jobs


def _task_spec(recipe: Recipe, task: TextTask) -> dict[str, Any]:
    shown = {"type": "text", "prompt": recipe.prompt(task.name), "max_length": recipe.max_length}
    judged = {**shown, "label": "label", "labels": recipe.answers(task)}
    folder = f"data/{task.name}"
    return {
        "calibration": {**shown, "path": f"{folder}/calibration.jsonl", "examples": CALIBRATION_EXAMPLES},
        "validation": {**judged, "path": f"{folder}/validation.jsonl"},
        "test": {**judged, "path": f"{folder}/test.jsonl"},
        "metric": "choice",
    }
