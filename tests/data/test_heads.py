from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file

from merging.data.heads import expert_head, label_problems, load_head, save_head
from merging.data.opening import open_examples
from merging.data.spec import TensorsData
from merging.data.task import LinearHead, Task
from merging.errors import DataError


def test_a_head_is_read_as_it_was_written(tmp_path):
    head = LinearHead(torch.randn(3, 4), torch.randn(3))

    save_head(head, tmp_path / "heads" / "mnist.safetensors")
    read = load_head(tmp_path / "heads" / "mnist.safetensors", task="mnist")

    assert torch.equal(read.weight_CF, head.weight_CF)
    assert torch.equal(read.bias_C, head.bias_C)


def test_a_head_needs_no_bias(tmp_path):
    save_head(LinearHead(torch.eye(3)), tmp_path / "head.safetensors")

    head = load_head(tmp_path / "head.safetensors", task="mnist")

    assert head.bias_C is None
    assert torch.equal(head(torch.ones(2, 3)), torch.ones(2, 3))


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ({"w": torch.ones(3, 4)}, 'has w, expected "weight"'),
        ({"weight": torch.ones(3, 4), "scale": torch.ones(1)}, "has scale, weight"),
        ({"weight": torch.ones(3)}, r'"weight" is \(3,\)'),
        ({"weight": torch.ones(3, 4, dtype=torch.long)}, "of torch.int64"),
        ({"weight": torch.ones(3, 4), "bias": torch.ones(4)}, r'"bias" is \(4,\), "weight" has 3 classes'),
        ({"weight": torch.full((3, 4), float("nan"))}, "12 values are NaN"),
    ],
)
def test_files_that_are_no_head(tmp_path, tensors, words):
    save_file(tensors, tmp_path / "head.safetensors")

    with pytest.raises(DataError, match=words):
        load_head(tmp_path / "head.safetensors", task="mnist")


def test_pickled_heads_are_refused(tmp_path):
    torch.save({"weight": torch.ones(3, 4)}, tmp_path / "head.pt")

    with pytest.raises(DataError, match="can run code"):
        load_head(tmp_path / "head.pt", task="mnist")


@pytest.mark.parametrize("name", ["classifier", "score", "model.classifier", "head"])
def test_the_experts_own_classifier_is_found(name):
    tensors = {f"{name}.weight": torch.ones(3, 4), f"{name}.bias": torch.ones(3)}

    head = expert_head(tensors, task="mnist")

    assert head.weight_CF.shape == (3, 4)
    assert head.bias_C.shape == (3,)


@pytest.mark.parametrize(
    "tensors",
    [
        {},
        {"visual_projection.weight": torch.ones(5, 4)},
        {"classifier.weight": torch.ones(3, 4), "score.weight": torch.ones(3, 4)},
    ],
)
def test_no_classifier_or_several(tensors):
    with pytest.raises(DataError, match=r"linear classifiers in .*, expected one"):
        expert_head(tensors, task="mnist")


@pytest.mark.parametrize("config", [None, {"model_type": "electron"}, {"model_type": "roberta"}])
def test_a_layer_before_the_classifier_that_no_known_class_has_is_told(config):
    tensors = {"classifier.dense.weight": torch.ones(4, 4), "classifier.out_proj.weight": torch.ones(3, 4)}

    with pytest.raises(DataError, match=r"classifier\.dense\.weight comes between"):  # without a bias
        expert_head(tensors, task="mnist", config=config)


def test_a_layer_before_the_classifier_has_its_classs_activation(tmp_path):
    weights = {"dense": torch.randn(4, 6), "out_proj": torch.randn(3, 4)}
    tensors = {f"classifier.{name}.weight": one for name, one in weights.items()}
    tensors |= {f"classifier.{name}.bias": torch.randn(len(one)) for name, one in weights.items()}
    x_BF = torch.randn(5, 6)

    heads = {
        kind: expert_head(tensors, task="mnist", config={"model_type": kind})
        for kind in ("roberta", "electra")
    }

    inner = torch.nn.functional.linear(
        x_BF, tensors["classifier.dense.weight"], tensors["classifier.dense.bias"]
    )
    for kind, activation in (("roberta", torch.tanh), ("electra", torch.nn.functional.gelu)):
        last = tensors["classifier.out_proj.weight"], tensors["classifier.out_proj.bias"]
        torch.testing.assert_close(heads[kind](x_BF), torch.nn.functional.linear(activation(inner), *last))
        assert heads[kind].shape == (3, 6)
        save_head(heads[kind], tmp_path / f"{kind}.safetensors")
        assert (
            load_head(tmp_path / f"{kind}.safetensors", task="mnist").fingerprint == heads[kind].fingerprint
        )
    assert heads["roberta"].fingerprint != heads["electra"].fingerprint


def test_labels_outside_the_heads_classes(tmp_path):
    save_file({"x": torch.ones(4, 2), "labels": torch.tensor([0, 5, -1, 2])}, tmp_path / "x.safetensors")
    spec = TensorsData(path=tmp_path / "x.safetensors")
    test = open_examples(spec, task="mnist", purpose="test", base_folder=None, seed=0)

    (problem,) = label_problems(Task("mnist", test=test, head=LinearHead(torch.ones(3, 4))))

    assert "2 of 4" in problem.what
    assert "labels from -1 to 5, the head has 3 classes" in problem.what
    assert not label_problems(Task("mnist", test=test))


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("dense.bias", torch.zeros(5)),
        ("dense.bias", torch.zeros(1)),
        ("dense.bias", torch.zeros(16, dtype=torch.int64)),
        ("dense.weight", torch.zeros(16, 32, dtype=torch.int32)),
        ("dense.weight", torch.zeros(16)),
        ("bias", torch.zeros(3, dtype=torch.int64)),
        ("bias", torch.zeros(3, dtype=torch.bool)),
        ("bias", torch.zeros(3, dtype=torch.complex64)),
        ("bias", torch.zeros(3).to(torch.float8_e4m3fn)),
        ("weight", torch.zeros(3, 16).to(torch.float8_e4m3fn)),
    ],
)
def test_each_tensor_of_a_head_has_the_shape_and_kind_that_it_needs(tmp_path, name, tensor):
    whole = {
        "weight": torch.zeros(3, 16),
        "bias": torch.zeros(3),
        "dense.weight": torch.zeros(16, 32),
        "dense.bias": torch.zeros(16),
    }
    save_file(whole, tmp_path / "whole.safetensors", {"activation": "tanh"})
    save_file({**whole, name: tensor}, tmp_path / "head.safetensors", {"activation": "tanh"})

    assert load_head(tmp_path / "whole.safetensors", task="a").dense is not None
    with pytest.raises(DataError, match=f'"{name}" is '):
        load_head(tmp_path / "head.safetensors", task="a")
