"""Whole runs on text: tiny T5, Llama and BERT with a tokenizer of their own, as a user has them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from safetensors.torch import save_file
from tiny_models import GROUPED, expert_of
from tiny_texts import saved, sentences, tokenizer, written
from torch import Tensor

from merging.checkpoints.sink import StateDictSink
from merging.checkpoints.source import StateDictSource
from merging.data.task import CalibrationData
from merging.errors import DataError
from merging.making import make_calibrators, make_merger
from merging.pipeline import Pipeline
from merging.spec import parse_spec

TASKS = ("movie", "shop")
CLASSES = {
    "t5": hf.T5ForConditionalGeneration,
    "llama": hf.LlamaForCausalLM,
    "bert": hf.BertModel,
}
PROBE = {"input_ids": torch.tensor([[1, 5, 9, 30], [1, 7, 8, 4]])}


@pytest.fixture(scope="module", params=CLASSES)
def workshop(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    folder = tmp_path_factory.mktemp(request.param)
    saved(folder, request.param, TASKS)
    for seed, task in enumerate(TASKS):
        written(folder / "data" / task / "calibration.jsonl", sentences(24, seed=seed))
        written(folder / "data" / task / "test.jsonl", sentences(16, seed=10 + seed))
        head = {"weight": torch.randn(2, 32, generator=torch.Generator().manual_seed(seed))}
        save_file(head, folder / f"{task}-head.safetensors")
    return request.param, folder


def spec_of(name: str, **changes: Any) -> dict[str, Any]:
    tasks = {}
    for task in TASKS:
        source = {"type": "text", "prompt": "{text}\nAnswer:", "max_length": 64}
        test = {**source, "path": f"data/{task}/test.jsonl", "label": "label"}
        tasks[task] = {
            "calibration": {
                **source,
                "path": f"data/{task}/calibration.jsonl",
                "examples": 20,
                "batch_size": 8,
            }
        }
        if name == "bert":
            tasks[task] |= {"test": test, "head": {"type": "linear", "path": f"{task}-head.safetensors"}}
        else:
            labels = {"neg": " neg", "pos": " pos"}
            tasks[task] |= {"test": {**test, "labels": labels}, "metric": "choice"}
    return {
        "base": "base",
        "experts": {task: task for task in TASKS},
        "merge": {"type": "average"},
        "calibrate": {"type": "featcal"},
        "tasks": tasks,
        "device": "cpu",
        **changes,
    }


def pipeline_of(workshop: tuple[str, Path], **changes: Any) -> Pipeline:
    name, folder = workshop
    return Pipeline(parse_spec(spec_of(name, **changes), folder, "run"))


def in_memory(pipeline: Pipeline) -> dict[str, Tensor]:
    """What merging and calibrating give before anything is stored."""
    opened, tasks = pipeline.resolve(), pipeline.tasks()
    data = CalibrationData({name: task.calibration for name, task in tasks.items()})  # type: ignore[misc]
    sink = StateDictSink(opened.models.base)
    with torch.no_grad(), sink:
        make_merger(pipeline.spec, opened, "cpu", None).merge(opened.models, data, sink)
    for calibrator in make_calibrators(pipeline.spec, "cpu", None):
        merged, sink = StateDictSource(sink.tensors, "merged"), StateDictSink(opened.models.base)
        with torch.no_grad(), sink:
            calibrator.calibrate(merged, opened.models, data, sink)
    return sink.tensors


def logits(model: Any, name: str) -> Tensor:
    probe = dict(PROBE)
    if name == "t5":
        probe["decoder_input_ids"] = torch.tensor([[0, 6], [0, 9]])
    with torch.no_grad():
        answer = model.eval()(**probe)
    return answer.last_hidden_state if name == "bert" else answer.logits


@pytest.mark.parametrize("method", ["featcal", "chain_of_merges"])
def test_a_run_on_text_leaves_a_model_that_reloads(
    workshop: tuple[str, Path], tmp_path: Path, method: str
) -> None:
    name, folder = workshop
    changes = {} if method == "featcal" else {"merge": {"type": method}, "calibrate": None}

    pipeline = pipeline_of(workshop, **changes)
    report = pipeline.run(tmp_path / "out")

    made = Path(report.checkpoint)
    model, loading = CLASSES[name].from_pretrained(made, output_loading_info=True)
    assert not any(loading[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    unstored = CLASSES[name].from_pretrained(folder / "base")
    unstored.load_state_dict(in_memory(pipeline), strict=False)
    assert torch.equal(logits(model, name), logits(unstored, name))
    assert not torch.equal(logits(model, name), logits(CLASSES[name].from_pretrained(folder / "base"), name))
    assert (made / "tokenizer.json").is_file()
    for task in TASKS:
        found = report.tasks[task]
        assert found.metric == ("accuracy" if name == "bert" else "choice")
        assert (found.test_examples, found.calibration_used, found.calibration_asked) == (16, 20, 20)
        last = found.scores.merged if method == "chain_of_merges" else found.scores.calibrated
        assert None not in (found.scores.base, found.scores.expert, found.scores.merged, last)
    assert report.solver
    assert all(row.tokens > 0 for row in report.solver)


def test_the_plan_tells_what_is_used(workshop: tuple[str, Path]) -> None:
    name, _ = workshop

    plan = pipeline_of(workshop).plan()

    assert plan.backbone == {"bert": "transformers"}.get(name, name)
    assert plan.tasks["movie"].used_for == "statistics, scores, drift"


@pytest.mark.parametrize("workshop", ["llama"], indirect=True)
def test_a_search_takes_the_least_perplexity(workshop: tuple[str, Path]) -> None:
    _, folder = workshop
    spec = spec_of("llama", merge={"type": "task_arithmetic"}, calibrate=None)
    for number, task in enumerate(TASKS):
        validation = written(folder / "data" / task / "validation.jsonl", sentences(16, seed=30 + number))
        source = {"type": "text", "path": str(validation)}
        spec["tasks"][task] = {"validation": source, "metric": "perplexity"}
    pipeline = Pipeline(parse_spec(spec, folder, "run"))

    found = pipeline.search({"merge.scale": [0.0, 0.5, 4.0]})

    assert found.curve is not None
    assert found.curve.criterion == "validation"
    worths = [point.mean for point in found.curve.points]
    assert worths == sorted(worths, reverse=True)  # noise of that size only hurts a random model
    assert found.curve.best == {"merge.scale": 0.0}


@pytest.mark.parametrize("workshop", ["llama"], indirect=True)
def test_a_report_of_a_perplexity_counts_down(workshop: tuple[str, Path], tmp_path: Path) -> None:
    _, folder = workshop
    spec = spec_of("llama", calibrate=None)
    spec["tasks"]["movie"]["metric"] = "perplexity"

    report = Pipeline(parse_spec(spec, folder, "run")).run(tmp_path / "out")

    movie = report.tasks["movie"]
    assert movie.lower_is_better
    assert movie.scores.expert is not None
    assert movie.scores.merged is not None
    assert movie.normalised.merged == pytest.approx(movie.scores.expert / movie.scores.merged)
    assert report.means.scores.merged is None
    assert report.means.normalised.merged is not None


@pytest.mark.parametrize("workshop", ["bert", "t5"], indirect=True)
def test_what_a_metric_lacks_is_found_before_any_work(workshop: tuple[str, Path]) -> None:
    name, folder = workshop
    spec = spec_of(name)
    spec["tasks"]["movie"]["metric"] = "perplexity"
    del spec["tasks"]["shop"]["test"]["label"]
    spec["tasks"]["shop"]["test"].pop("labels", None)

    with pytest.raises(DataError) as caught:
        Pipeline(parse_spec(spec, folder, "run")).validate()

    told = {problem.where: problem.what for problem in caught.value.problems}
    words = "only reads it" if name == "bert" else "there is none"
    assert words in told["tasks.movie.test"]
    assert ("labels" in told["tasks.shop.test"]) or ("head" in told["tasks.shop.test"])


def test_a_causal_models_own_classifier_is_its_head(tmp_path: Path) -> None:
    """Scores are those of transformers' own forward, on batches and all."""
    torch.manual_seed(0)
    config = hf.LlamaConfig(**GROUPED, num_labels=2)
    base = hf.LlamaForSequenceClassification(config).eval()
    base.save_pretrained(tmp_path / "base")
    tokenizer("causal").save_pretrained(tmp_path / "base")
    rows = sentences(20)
    for seed, task in enumerate(TASKS, start=1):
        expert = hf.LlamaForSequenceClassification(config).eval()
        expert.load_state_dict(expert_of(base, seed, 0.05))
        expert.save_pretrained(tmp_path / task)
        for row in rows:
            ids = torch.tensor([tokenizer("causal")(row["text"])["input_ids"]])
            with torch.no_grad():
                row["label"] = int(expert(ids).logits.argmax())
        written(tmp_path / f"{task}.jsonl", rows)
    source = {"type": "text", "label": "label", "batch_size": 6}
    spec = {
        "base": "base",
        "experts": {task: task for task in TASKS},
        "merge": {"type": "average"},
        "tasks": {task: {"test": {**source, "path": f"{task}.jsonl"}} for task in TASKS},
        "device": "cpu",
    }

    report = Pipeline(parse_spec(spec, tmp_path, "run")).run(tmp_path / "out")

    assert {report.tasks[task].scores.expert for task in TASKS} == {1.0}
    assert (tmp_path / "out" / "heads" / "movie.safetensors").is_file()
