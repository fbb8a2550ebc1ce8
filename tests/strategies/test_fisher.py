"""Fisher merging: the diagonals against their definition, the mean's identities, and what it refuses."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import expert_of, made, opened, pixels, same_data
from torch import Tensor

import merging
from merging.checkpoints.sink import StateDictSink
from merging.data.task import CalibrationData, LinearHead
from merging.errors import DataError, SpecError
from merging.fisher_information import DiagonalFisher, fisher_mean
from merging.strategies.fisher import Fisher

HEAD = LinearHead(torch.randn(4, 32, generator=torch.Generator().manual_seed(7)))


@pytest.fixture(scope="module")
def clip():
    backbone, model, _ = made("clip")
    return backbone, {name: tensor.detach() for name, tensor in model.state_dict().items()}, model


def merged(backbone, base, experts, *, examples=6, **settings) -> tuple[dict[str, Tensor], dict]:
    models = opened(base, experts, backbone)
    data = CalibrationData(dict(same_data(experts, pixels(examples))), dict.fromkeys(experts, HEAD))
    sink = StateDictSink(models.base)
    with sink:
        notes = Fisher(**settings).merge(models, data, sink)
    return sink.tensors, notes


def linear_softmax(weight_CF: Tensor, inputs_BF: Tensor) -> Tensor:
    """The exact diagonal of softmax(W x): for entry (c, f), mean of x_f^2 p_c (1 - p_c)."""
    p_BC = (inputs_BF @ weight_CF.T).softmax(-1)
    return ((p_BC * (1 - p_BC)).T @ inputs_BF.square()) / len(inputs_BF)


def test_the_exact_diagonal_is_that_of_the_formula():
    weight_CF = torch.randn(3, 5, dtype=torch.float64).requires_grad_()
    inputs_BF = torch.randn(7, 5, dtype=torch.float64)
    fisher = DiagonalFisher({"w": weight_CF})

    for x_F in inputs_BF:
        fisher.add_example(weight_CF @ x_F)

    assert torch.allclose(fisher.mean()["w"], linear_softmax(weight_CF.detach(), inputs_BF))


def test_a_batch_of_one_example_with_the_ports_square_still_has_cross_terms_of_classes():
    weight_CF = torch.randn(3, 5, dtype=torch.float64).requires_grad_()
    x_1F = torch.randn(1, 5, dtype=torch.float64)
    fisher = DiagonalFisher({"w": weight_CF})

    fisher.add_batch(x_1F @ weight_CF.T)

    p_C = (x_1F @ weight_CF.T).softmax(-1)[0].detach()
    inner_C = p_C.sqrt() - p_C * p_C.sqrt().sum()
    assert torch.allclose(fisher.mean()["w"], (inner_C[:, None] * x_1F).square())


def test_a_parameter_that_nothing_hangs_on_has_no_information():
    used, unused = torch.ones(3).requires_grad_(), torch.ones(2).requires_grad_()
    fisher = DiagonalFisher({"used": used, "unused": unused})

    fisher.add_example(used * 2)

    assert fisher.mean()["unused"].tolist() == [0, 0]


@given(st.integers(0, 10**6), st.sampled_from(["max", "add"]), st.floats(1e-8, 1.0))
def test_the_mean_lies_between_the_experts_and_ignores_the_scale_of_weights(seed, by, floor):
    random = torch.Generator().manual_seed(seed)
    experts_NS = torch.randn(3, 4, generator=random, dtype=torch.float64)
    fishers_NS = torch.rand(3, 4, generator=random, dtype=torch.float64) * (
        torch.rand(3, 4, generator=random) > 0.3
    )
    weights_N = torch.rand(3, generator=random, dtype=torch.float64) + 0.1

    mean_S = fisher_mean(experts_NS, fishers_NS, weights_N, floor=floor, by=by)

    assert bool((mean_S >= experts_NS.amin(0) - 1e-9).all())
    assert bool((mean_S <= experts_NS.amax(0) + 1e-9).all())
    assert torch.allclose(mean_S, fisher_mean(experts_NS, fishers_NS, 5 * weights_N, floor=floor, by=by))


def test_without_information_it_is_the_weighted_mean():
    experts_NS = torch.tensor([[0.0, 4.0], [4.0, 0.0]], dtype=torch.float64)
    weights_N = torch.tensor([3.0, 1.0], dtype=torch.float64)

    for only in (None, 0):
        mean_S = fisher_mean(experts_NS, torch.zeros(2, 2), weights_N, floor=1e-6, by="max", only=only)
        assert mean_S.tolist() == ([1.0, 3.0] if only is None else [0.0, 4.0])


@pytest.mark.parametrize("settings", [{}, {"estimate": "batch"}, {"normalize": False, "floor_by": "add"}])
def test_equal_experts_give_the_expert(clip, settings):
    backbone, base, model = clip
    expert = expert_of(model, 1)

    found, _ = merged(backbone, base, {"a": expert, "b": expert}, **settings)

    assert all(torch.equal(found[name], expert[name]) for name in expert)


def test_the_expert_that_hangs_on_a_weight_decides_it(clip):
    backbone, base, model = clip
    one, other = expert_of(model, 1), expert_of(model, 2)
    heads = {"a": HEAD, "b": LinearHead(torch.zeros(4, 32))}  # b's predictions hang on nothing
    models = opened(base, {"a": one, "b": other}, backbone)
    data = CalibrationData(dict(same_data({"a": 0, "b": 0}, pixels(6))), heads)
    sink = StateDictSink(models.base)

    with sink:
        notes = Fisher(normalize=False, floor=1e-30).merge(models, data, sink)

    assert notes["fisher_norms"]["b"] == 0 < notes["fisher_norms"]["a"]
    name = "encoder.layers.2.mlp.fc2.weight"
    assert torch.allclose(sink.tensors[name], one[name], atol=1e-6)


def test_order_and_placement_of_the_experts_change_nothing(clip):
    backbone, base, model = clip
    experts = {"a": expert_of(model, 1), "b": expert_of(model, 2)}

    one, _ = merged(backbone, base, experts)
    other, _ = merged(backbone, base, dict(reversed(experts.items())))

    assert all(torch.equal(one[name], other[name]) for name in one)


def test_estimates_of_batches_hang_on_the_batch_size_and_exact_ones_do_not(clip):
    backbone, base, model = clip
    experts = {"a": expert_of(model, 1), "b": expert_of(model, 2)}
    whole, single = pixels(6), pixels(6)["pixel_values"].split(1)
    found = {}
    for estimate in ("exact", "batch"):
        for size, batches in (("whole", [whole]), ("single", [{"pixel_values": one} for one in single])):
            models = opened(base, experts, backbone)
            data = CalibrationData(dict(same_data(experts, *batches)), dict.fromkeys(experts, HEAD))
            sink = StateDictSink(models.base)
            with sink:
                Fisher(estimate=estimate).merge(models, data, sink)
            found[estimate, size] = sink.tensors["encoder.layers.1.mlp.fc1.weight"]

    assert torch.equal(found["exact", "whole"], found["exact", "single"])
    assert not torch.allclose(found["batch", "whole"], found["batch", "single"], atol=1e-5)


def test_it_can_be_called_by_name_and_needs_heads(clip):
    backbone, base, model = clip
    experts = {"a": expert_of(model, 1), "b": expert_of(model, 2)}
    data = dict(same_data(experts, pixels(2)))

    heads = dict.fromkeys(experts, HEAD)
    found = merging.merge("fisher", base, experts, data=data, heads=heads, backbone=backbone)

    assert found.keys() == base.keys()
    with pytest.raises(DataError, match="no head for a, b"):
        merging.merge("fisher", base, experts, data=data, backbone=backbone)
    with pytest.raises(DataError, match="needs calibration examples"):
        merging.merge("fisher", base, experts, backbone=backbone)


@pytest.mark.parametrize(
    ("weights", "settings", "words"),
    [
        ({"a": -1.0}, {}, "no weight may be negative"),
        ({}, {"target": "c"}, 'there is no expert "c"; there are: a, b'),
        ({}, {"floor": 0}, "floor: found the number 0, expected at least 1e-30"),
    ],
)
def test_what_it_refuses(clip, weights, settings, words):
    backbone, base, model = clip
    experts = {"a": expert_of(model, 1), "b": expert_of(model, 2)}

    with pytest.raises(SpecError, match=words):
        merging.merge("fisher", base, experts, weights=weights, backbone=backbone, **settings)
