from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file

from merging.data.opening import open_examples
from merging.data.spec import TensorsData
from merging.data.task import LinearHead, Task
from merging.errors import DataError, NumericalError
from merging.evaluation.evaluator import evaluate
from merging.evaluation.forward import features, input_problems
from merging.evaluation.metric import TaskScore


@pytest.fixture
def task(tmp_path):
    """A function that makes a task of random images, labels and head."""

    def made(name, *, seed, labels=None, width=32, examples=10, **fields):
        random = torch.Generator().manual_seed(seed)
        pixels = torch.randn(examples, 3, 32, 32, generator=random)
        drawn = torch.randint(0, 3, (examples,), generator=random)
        save_file(
            {"pixel_values": pixels, "labels": drawn if labels is None else labels},
            tmp_path / f"{name}.safetensors",
        )
        spec = TensorsData(path=tmp_path / f"{name}.safetensors", batch_size=4)
        test = open_examples(spec, task=name, purpose="test", base_folder=None, seed=0)
        return Task(name, test=test, head=LinearHead(torch.randn(3, width, generator=random)), **fields)

    return made


def test_score_is_the_share_of_right_classes(tower, task):
    backbone, model = tower
    mnist = task("mnist", seed=0)

    scores = evaluate(model(0), backbone, [mnist])

    predicted = [mnist.head(features(model(0), backbone, batch)).argmax(-1) for batch in mnist.test.batches()]
    right = (torch.cat(predicted) == mnist.test.labels).sum().item()
    assert scores == {"mnist": TaskScore("accuracy", right / 10, 10)}


def test_labels_that_the_model_gives_itself_are_all_right(tower, task):
    backbone, model = tower
    mnist = task("mnist", seed=0)
    own = torch.cat(
        [mnist.head(features(model(0), backbone, batch)) for batch in mnist.test.batches()]
    ).argmax(-1)

    scores = evaluate(model(0), backbone, [task("mnist", seed=0, labels=own)])

    assert scores["mnist"].value == 1


def test_evaluating_twice_and_in_another_order_is_the_same(tower, task):
    backbone, model = tower
    merged, tasks = model(0), [task("mnist", seed=0), task("svhn", seed=1)]

    first = evaluate(merged, backbone, tasks)

    assert evaluate(merged, backbone, tasks) == first
    assert evaluate(merged, backbone, tasks[::-1]) == first


def test_adapt_stands_between_model_and_head(tower, task):
    backbone, model = tower
    mnist, asked = task("mnist", seed=0, labels=torch.ones(10, dtype=torch.long)), []

    def towards_class_one(features_BF, name):
        asked.append(name)
        return mnist.head.weight_CF[1].expand_as(features_BF) * 100 - mnist.head.weight_CF[[0, 2]].sum(0) * 10

    scores = evaluate(model(0), backbone, [mnist], towards_class_one)

    assert scores["mnist"].value == 1
    assert set(asked) == {"mnist"}


def test_progress_counts_batches(tower, task):
    backbone, model = tower
    seen = []

    evaluate(
        model(0),
        backbone,
        [task("mnist", seed=0), task("svhn", seed=1)],
        progress=lambda stage, done, total: seen.append((done, total)),
    )

    assert seen == [(done, 6) for done in range(1, 7)]


def test_tasks_without_head_or_test_examples_are_left_out(tower, task):
    backbone, model = tower
    complete = task("mnist", seed=0)

    scores = evaluate(
        model(0), backbone, [complete, Task("a", head=complete.head), Task("b", test=complete.test)]
    )

    assert scores.keys() == {"mnist"}


def test_a_model_in_bfloat16_takes_float_inputs(tower, task):
    backbone, model = tower

    scores = evaluate(model(0).bfloat16(), backbone, [task("mnist", seed=0)])

    assert scores["mnist"].examples == 10


def test_head_of_another_width(tower, task):
    backbone, model = tower

    with pytest.raises(DataError, match="head reads 48 features, the model gives 32"):
        evaluate(model(0), backbone, [task("mnist", seed=0, width=48)])


def test_labels_that_the_head_does_not_know(tower, task):
    backbone, model = tower

    with pytest.raises(DataError, match=r"(?s)do not fit.*from 7 to 7, the head has 3 classes"):
        evaluate(model(0), backbone, [task("mnist", seed=0, labels=torch.full((10,), 7))])


def test_features_that_are_not_finite(tower, task):
    backbone, model = tower
    broken = model(0)
    with torch.no_grad():
        next(broken.parameters()).fill_(float("nan"))

    with pytest.raises(NumericalError, match='task "mnist"'):
        evaluate(broken, backbone, [task("mnist", seed=0)])


def test_inputs_that_the_model_does_not_take(tower, task, tmp_path):
    backbone, _ = tower
    save_file({"pixel_value": torch.zeros(2, 3, 32, 32)}, tmp_path / "x.safetensors")
    spec = TensorsData(path=tmp_path / "x.safetensors")
    misspelt = open_examples(spec, task="mnist", purpose="calibration", base_folder=None, seed=0)

    problems = input_problems(misspelt, backbone.skeleton(), "mnist")

    assert [problem.remedy for problem in problems] == ['did you mean "pixel_values"?']
    assert not input_problems(task("mnist", seed=0).test, backbone.skeleton(), "mnist")
