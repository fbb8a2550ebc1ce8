"""AdaMerging: its gradient against torch's own, what it learns, and that the same seed learns the same."""

from __future__ import annotations

import pytest
import torch
from tiny_models import Given, expert_of, made, opened, pixels

import merging
from merging.checkpoints.sink import StateDictSink
from merging.data.task import CalibrationData, LinearHead
from merging.entropy_descent import MergedModel, descend, entropy
from merging.errors import DataError
from merging.strategies.ada_merging import AdaMerging

HEADS = {
    task: LinearHead(torch.randn(4, 32, generator=torch.Generator().manual_seed(seed)))
    for seed, task in enumerate("ab")
}
FEW = {"steps": 6, "learning_rate": 0.05}


@pytest.fixture(scope="module")
def clip():
    backbone, model, _ = made("clip")
    base = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    return backbone, base, {"a": expert_of(model, 1, 0.05), "b": expert_of(model, 2, 0.05)}


def learned(clip, *, seed=0, told=lambda *_: None, experts=None, **settings):
    backbone, base, known = clip
    models = opened(base, experts or known, backbone)
    batches = [pixels(3, seed=number) for number in range(3)]
    sink = StateDictSink(models.base)
    with sink:
        data = CalibrationData(dict.fromkeys(known, Given(*batches)), HEADS)
        notes = AdaMerging(seed=seed, **{**FEW, **settings}).merge(models, data, sink, progress=told)
    return sink.tensors, notes


def test_the_gradient_is_that_of_the_whole_graph():
    base = {"w": torch.randn(3, 5), "b": torch.randn(3)}
    deltas = {"w": torch.randn(2, 3, 5), "b": torch.randn(2, 3)}
    batches, start_LN = [torch.randn(4, 5), torch.randn(6, 5)], torch.full((2, 2), 0.3)

    def loss_on(x):
        return lambda weights: entropy(x @ weights["w"].T + weights["b"])

    losses = [loss_on(x) for x in batches]
    found, gradient_LN = MergedModel({}, base, deltas, {"w": 0, "b": 1}).gradient(start_LN, losses)

    leaf_LN = start_LN.clone().requires_grad_()
    whole = {
        name: base[name] + torch.tensordot(leaf_LN[row], deltas[name], 1) for row, name in enumerate("wb")
    }
    total = sum(loss(whole) for loss in losses)
    total.backward()
    assert found == pytest.approx(total.item())
    assert torch.allclose(gradient_LN, leaf_LN.grad, atol=1e-6)


def test_beyond_the_clamp_no_gradient_arrives():
    steps = list(
        descend(
            torch.tensor([[1.2, -0.1, 0.5]]),
            lambda values_LN: (float(values_LN.sum()), torch.ones_like(values_LN)),
            steps=2,
            learning_rate=0.1,
            clamp=True,
        )
    )

    assert steps[0].gradient_LN.tolist() == [[0, 0, 1]]
    assert steps[-1].coefficients_LN.tolist()[0] == pytest.approx([1, 0, 0.3])


def test_predictions_become_surer(clip):
    _, notes = learned(clip, steps=40, batches=3, granularity="task", clamp=False)

    assert notes["losses"][-1] < notes["losses"][0]
    assert notes["coefficients"].keys() == {"all tensors"}


def test_with_a_step_of_nothing_it_is_task_arithmetic(clip):
    _, base, experts = clip

    found, notes = learned(clip, steps=1, learning_rate=1e-12, initial=0.4)

    wanted = merging.merge("task_arithmetic", base, experts, scale=0.4)
    assert all(torch.allclose(found[name], wanted[name], atol=1e-6) for name in wanted)
    assert notes["coefficients"].keys() == {name for name in base if base[name].is_floating_point()}


def test_plus_plus_is_then_ties_with_a_sum(clip):
    _, base, experts = clip

    found, _ = learned(clip, steps=1, learning_rate=1e-12, plus_plus=True, density=0.3)

    wanted = merging.merge("ties", base, experts, scale=0.3, density=0.3, merge="sum")
    assert all(torch.allclose(found[name], wanted[name], atol=1e-6) for name in wanted)


def test_the_same_seed_learns_the_same_whatever_the_order(clip):
    turned = dict(reversed(clip[2].items()))

    one, notes = learned(clip)
    other, _ = learned(clip, experts=turned)
    _, others = learned(clip, seed=1, batches=1)

    assert all(torch.equal(one[name], other[name]) for name in one)
    assert others["coefficients"] != notes["coefficients"]


def test_it_stops_when_nothing_is_gained(clip):
    seen = []

    _, notes = learned(
        clip, steps=50, patience=2, learning_rate=1e-12, told=lambda *event: seen.append(event)
    )

    assert len(notes["losses"]) < 50
    assert ("learn coefficients", 1, 50) in seen


def test_kept_tensors_are_the_bases(clip):
    from dataclasses import replace

    backbone, base, experts = clip
    models = replace(opened(base, experts, backbone), kept=frozenset({"post_layernorm.weight"}))
    sink = StateDictSink(models.base)
    with sink:
        notes = AdaMerging(**FEW).merge(
            models, CalibrationData(dict.fromkeys(experts, Given(pixels(3))), HEADS), sink
        )

    assert torch.equal(sink.tensors["post_layernorm.weight"], base["post_layernorm.weight"])
    assert "post_layernorm.weight" not in notes["coefficients"]


def test_a_task_without_head(clip):
    backbone, base, experts = clip
    data = dict.fromkeys(experts, Given(pixels(3)))

    with pytest.raises(DataError, match=r"no head for b[\s\S]*\"head\""):
        merging.merge("ada_merging", base, experts, data=data, heads={"a": HEADS["a"]}, backbone=backbone)
