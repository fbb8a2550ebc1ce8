"""A text suite from end to end on tiny models: made, resumed, merged and measured."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny_texts import saved

from benchmarks.suites.__main__ import main
from benchmarks.suites.grid import Records, Suite, references
from benchmarks.suites.rows import RULES
from benchmarks.suites.text import making, training
from benchmarks.suites.text.making import ADAPTER_SPEC, Recipe, make, suite_of
from benchmarks.suites.text.splits import PARTS, Part
from benchmarks.suites.text.tasks import TextTask
from benchmarks.suites.text.training import Lesson, Training, train
from benchmarks.suites.text_llama.suite import RECIPE as LLAMA
from benchmarks.suites.text_t5.base_model import with_gaps
from benchmarks.suites.text_t5.suite import RECIPE as T5
from merging.contracts.method import silent
from merging.demo.llm.texts import Text, write_texts
from merging.demo.packages import Package
from merging.demo.side_by_side import Job
from merging.demo.suite import fingerprint
from merging.pipeline import Pipeline

RECIPES = {"t5": T5, "llama": LLAMA}
NO_PACKAGE = Package(name="none", version="1", file="none.whl", size=0, sha256="")

# Of transformers, about what peft asks it.
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")


def in_process(jobs: Sequence[Job], report: Callable[[int, int], None]) -> None:
    """What run_side_by_side does, without starting Python for each."""
    for job in jobs:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("sys.argv", ["training", *job.arguments])
            patch.setattr(training, "step_counter", lambda: lambda done, total: None)
            training.main()
    report(len(jobs), len(jobs))


def opinions(_: object) -> Iterator[tuple[Text, Part]]:
    return drawn({"bad": "dull awful poor", "good": "great superb fine"})


def kinds(_: object) -> Iterator[tuple[Text, Part]]:
    return drawn({"film": "film plot cast", "song": "song book text"})


def drawn(classes: Mapping[str, str]) -> Iterator[tuple[Text, Part]]:
    """Texts whose first word tells the class, in four parts of equal size."""
    others = ["i", "we", "it", "was", "quite", "very", "so"]
    for number, part in enumerate([part for part in PARTS for _ in range(12)]):
        label = list(classes)[number % 2]
        words = [classes[label].split()[number % 3], others[number % 7], others[number // 7]]
        yield Text(" ".join(words), label), part


@pytest.fixture(params=RECIPES)
def recipe(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Recipe:
    """One of the two, with two tasks of tiny texts on a tiny base."""
    kind = request.param
    monkeypatch.setattr(making, "run_side_by_side", in_process)
    start = tmp_path / "start"

    def base_job(recipe: Recipe, *given: Any) -> Job:
        folder, workshop = given[2:]
        saved(start, kind)
        texts = workshop / "start.jsonl"
        write_texts([Text("the film", "good")], texts, labelled=True)
        lessons = (Lesson(prompt="{text}", texts=str(texts)),)
        warm_up = replace(recipe.training(lessons, 1), form="norms")
        history = folder.parents[1] / "training" / "base.json"
        return training.training_job("the base", warm_up, start / "base", folder, history, workshop)

    return replace(
        RECIPES[kind],
        tasks=(
            TextTask("opinion", ("bad", "good"), NO_PACKAGE, opinions),
            TextTask("kind", ("film", "song"), NO_PACKAGE, kinds),
        ),
        warm_up=(),
        steps={"opinion": 30, "kind": 30},
        max_length=12,
        batch=8,
        learning_rate=5e-3,
        adapter_rate=1e-2,
        base_job=base_job,
    )


def made_by(recipe: Recipe, folder: Path) -> dict[str, Path]:
    """Makes the suite as `build` does, and gives its specs."""
    archives: Mapping[str, Any] = {NO_PACKAGE.name: None}
    make(recipe, folder, archives, silent)
    suite = suite_of(recipe)
    specs = {"spec.json": suite.spec, **suite.also}
    for name, spec in specs.items():
        (folder / name).write_text(json.dumps(spec))
    assert all((folder / part).exists() for part in suite.parts)
    return {name: folder / name for name in specs}


def test_a_suite_is_made_merged_and_measured(recipe: Recipe, tmp_path: Path) -> None:
    folder = tmp_path / "suite"
    specs = made_by(recipe, folder)

    reports = {name: Pipeline.from_spec(path).run(tmp_path / name[:-5]) for name, path in specs.items()}

    assert list(reports) == ["spec.json", ADAPTER_SPEC]
    for report in reports.values():
        for task in ("opinion", "kind"):
            scores = report.tasks[task].scores
            assert scores.base is not None
            assert scores.merged is not None
            assert scores.expert is not None
        assert report.means.scores.base < report.means.scores.expert  # type: ignore[operator]
    base, expert, joint = (
        load_file(folder / "models" / name / "model.safetensors") for name in ("base", "kind", "joint")
    )
    assert base.keys() == expert.keys() == joint.keys()
    changed = {name for name in base if not torch.equal(base[name], expert[name])}
    assert changed
    assert all(".layers." in name or ".block." in name for name in changed)
    records = Records(tmp_path / "records.jsonl")
    references(Suite(specs["spec.json"]), folder / "models" / "joint", records)
    for name in ("base", "experts"):
        scored = records.entries["references", name, "none", 0].scores
        told = {task: report.scores for task, report in reports["spec.json"].tasks.items()}
        assert scored == {task: getattr(scores, name.removesuffix("s")) for task, scores in told.items()}
    history = json.loads((folder / "training" / "kind.json").read_text())
    assert [look["step"] for look in history] == [6, 12, 18, 24, 30]
    assert history[-1]["loss"] < history[0]["loss"]


def test_every_rule_that_needs_no_head_is_measured(recipe: Recipe, tmp_path: Path) -> None:
    spec, out = made_by(recipe, tmp_path / "suite")[ADAPTER_SPEC], tmp_path / "measured"

    main(["measure", str(spec), "--out", str(out), "--only", "rules", "--defaults"])

    entries = Records(out / "records.jsonl").of("rules")
    wanted = {row.label for row in RULES if not row.needs_heads}
    assert {(entry.row, entry.calibrator) for entry in entries} == {
        (label, calibrator) for label in wanted for calibrator in ("none", "featcal")
    }
    assert all(0 <= score <= 1 for entry in entries for score in entry.scores.values())


def test_making_goes_on_where_it_was_stopped(
    recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = replace(recipe, steps={"opinion": 1, "kind": 1})
    made_by(recipe, tmp_path / "suite")
    (tmp_path / "suite/models/kind").rename(tmp_path / "first")
    asked: list[str] = []

    def told(jobs: Sequence[Job], report: Callable[[int, int], None]) -> None:
        asked.extend(job.name for job in jobs)
        in_process(jobs, report)

    monkeypatch.setattr(making, "run_side_by_side", told)
    made_by(recipe, tmp_path / "suite")

    assert asked == ["models kind"]
    first, again = (
        load_file(folder / "model.safetensors")
        for folder in (tmp_path / "first", tmp_path / "suite/models/kind")
    )
    assert all(torch.equal(first[name], again[name]) for name in first)


def test_an_adapter_names_the_suites_base_and_has_rank_sixteen(tmp_path: Path) -> None:
    saved(tmp_path, "llama")
    write_texts([Text("the film", "good")], tmp_path / "texts.jsonl", labelled=True)
    lessons = (Lesson(prompt="{text}", texts=str(tmp_path / "texts.jsonl")),)
    told = Training(lessons, max_length=8, steps=1, batch=2, learning_rate=1e-3, form="lora")

    train(told, tmp_path / "base", tmp_path / "adapter", lambda done, total: None)

    config = json.loads((tmp_path / "adapter/adapter_config.json").read_text())
    assert (config["r"], config["base_model_name_or_path"]) == (16, "models/base")
    found = load_file(tmp_path / "adapter/adapter_model.safetensors")
    assert {name.split(".")[-3] for name in found} == set(training.LINEARS["llama"])


def test_an_answer_of_several_tokens_is_refused_for_a_causal_model(tmp_path: Path) -> None:
    saved(tmp_path, "llama")
    write_texts([Text("the film", "very good")], tmp_path / "texts.jsonl", labelled=True)
    lessons = (Lesson(prompt="{text}", texts=str(tmp_path / "texts.jsonl")),)
    told = Training(lessons, max_length=8, steps=1, batch=2, learning_rate=1e-3)

    with pytest.raises(ValueError, match="too many values"):
        train(told, tmp_path / "base", tmp_path / "expert", lambda done, total: None)


def test_gaps_hide_the_word_that_is_the_answer() -> None:
    texts = with_gaps([Text("we loved the film", "positive"), Text("so 10/10", "positive")])

    assert len(texts) == 2
    assert all(text.text.replace("[MASK]", text.label) == "we loved the film" for text in texts)


def test_a_change_of_the_recipe_gets_a_place_of_its_own_in_the_cache() -> None:
    changes = ({"version": 99}, {"learning_rate": 1.0}, {"steps": {**T5.steps, "movie": 1}}, {"seed": 5})

    names = {fingerprint(suite_of(one)) for one in (T5, *(replace(T5, **change) for change in changes))}

    assert len(names) == 1 + len(changes)
    assert fingerprint(suite_of(replace(T5, origin="Elsewhere."))) == fingerprint(suite_of(T5))
