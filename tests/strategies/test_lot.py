"""LOT Merging through the sweep."""

from __future__ import annotations

import pytest
import torch
from tiny_models import Given, expert_of, made, pixels
from torch import Tensor

import merging
from merging.checkpoints.sink import StateDictSink
from merging.checkpoints.source import StateDictSource
from merging.moments import Moments, NormMoments
from merging.normal_equations import NormalEquations, NormEquations
from merging.scaling import ScaledSink
from merging.strategies.lot import Lot

State = dict[str, Tensor]


def state_of(model: torch.nn.Module) -> State:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def furthest(found: State, wanted: State, *names: str) -> float:
    return max(float((found[name] - wanted[name]).abs().max()) for name in names or wanted)


def lot(
    backbone: object, base: object, experts: dict[str, State], data: object = None, **settings: object
) -> State:
    """Merged with pictures of its own for each expert, where no data is given."""
    own = data or {name: Given(pixels(20, seed=seed)) for seed, name in enumerate(sorted(experts))}
    return merging.merge("lot", base, experts, data=own, backbone=backbone, **settings)


@pytest.mark.parametrize("name", ["clip", "clip_projection", "vit_classifier", "t5", "llama", "gpt2", "bart"])
def test_every_tensor_of_a_model_is_finite(name):
    backbone, model, batches = made(name)
    expert = expert_of(model, 1)
    experts = {"a": expert, "again": expert, "b": expert_of(model, 2), "nothing": state_of(model)}

    merged = lot(backbone, model, experts, {task: Given(*batches) for task in experts})

    assert merged.keys() == model.state_dict().keys()
    assert all(torch.isfinite(tensor).all() for tensor in merged.values())
    model.load_state_dict(merged)


def test_experts_equal_to_the_base_give_the_base():
    backbone, model, _ = made("clip")
    base = state_of(model)

    merged = lot(backbone, base, {"a": base, "b": base})

    assert all(torch.equal(merged[name], base[name]) for name in base)


def test_scale_zero_gives_the_base():
    backbone, model, _ = made("clip")
    base = state_of(model)

    merged = lot(backbone, base, {"a": expert_of(model, 1), "b": expert_of(model, 2)}, scale=0.0)

    assert all(torch.equal(merged[name], base[name]) for name in base)


def test_scale_weighs_every_task_vector():
    backbone, model, _ = made("clip")
    experts = {"a": expert_of(model, 1), "b": expert_of(model, 2)}
    base = state_of(model)

    whole = lot(backbone, base, experts)
    half = lot(backbone, base, experts, scale=0.5)

    assert furthest(half, {name: (whole[name] + base[name]) / 2 for name in base}) < 1e-6


def test_order_of_experts_changes_nothing():
    backbone, model, _ = made("clip")
    experts = {name: expert_of(model, seed) for seed, name in enumerate("abc", start=1)}

    merged = lot(backbone, model, experts)

    assert furthest(merged, lot(backbone, model, dict(reversed(experts.items())))) < 1e-6


@pytest.mark.parametrize("copies", [1, 3])
def test_identical_experts_come_back(copies):
    backbone, model, _ = made("clip")
    expert = expert_of(model, 1)

    merged = lot(backbone, model, dict.fromkeys("abc"[:copies], expert))

    # Inputs of a norm's output have a mean of zero over its features: one direction that nothing shows.
    assert furthest(merged, expert) < 0.02


def test_biases_and_embeddings_are_averaged():
    backbone, model, _ = made("clip")
    experts = {"a": expert_of(model, 1), "b": expert_of(model, 2)}

    merged = lot(backbone, model, experts)

    average = merging.merge("average", model, experts)
    means = [name for name in average if name.endswith(".bias") or "embedding" in name]
    assert furthest(merged, {name: average[name] for name in means}) < 1e-6
    assert furthest(merged, {name: average[name] for name in average if "q_proj.weight" in name}) > 1e-3


def test_norms_are_averaged_unless_they_are_merged():
    backbone, model, _ = made("clip")
    experts = {"a": expert_of(model, 1), "b": expert_of(model, 2)}
    average = merging.merge("average", model, experts)
    scales = {name: average[name] for name in average if "layer_norm" in name and name.endswith("weight")}

    assert furthest(lot(backbone, model, experts, norms=False), scales) < 1e-6
    assert furthest(lot(backbone, model, experts), scales) > 1e-4


def test_more_tokens_count_more_unless_grams_are_means():
    backbone, model, _ = made("clip")
    experts = {"a": expert_of(model, 1), "b": expert_of(model, 2)}
    once = {"a": Given(pixels(20)), "b": Given(pixels(20, seed=1))}
    often = {"a": Given(pixels(20)), "b": Given(*[pixels(20, seed=1)] * 5)}
    queries = [name for name in experts["a"] if "q_proj.weight" in name]

    def moved(gram: str) -> float:
        few, many = (lot(backbone, model, experts, data, gram=gram) for data in (once, often))
        return furthest(few, many, *queries)

    assert moved("mean") < 1e-4
    assert moved("sum") > 1e-3


def test_directions_that_no_example_shows_keep_the_base():
    base_OD, delta_OD = torch.randn(5, 8, dtype=torch.float64), torch.randn(2, 5, 8)
    x_TD = torch.randn(2, 2, 8)
    equations = NormalEquations(8, 5)
    for delta, x in zip(delta_OD, x_TD, strict=True):
        moments = Moments(8)
        moments.add(x)
        Lot().add(equations, base_OD + delta, moments)

    change_OD = Lot().solve(equations, base_OD, base_OD) - base_OD

    unseen_D8 = torch.linalg.svd(x_TD.flatten(0, 1).double(), full_matrices=True).Vh[4:]
    assert (change_OD @ unseen_D8.T).abs().max() < 1e-5
    assert change_OD.abs().max() > 0.1


def test_small_task_vectors_survive_on_large_weights():
    base_OD = 100 * torch.randn(6, 10)
    deltas = 1e-2 * torch.randn(2, 6, 10, dtype=torch.float64)
    x_TD = torch.randn(2, 200, 10)
    equations = NormalEquations(10, 6)
    grams = [x.double().T @ x.double() for x in x_TD]
    for delta, x in zip(deltas, x_TD, strict=True):
        moments = Moments(10)
        moments.add(x)
        Lot().add(equations, base_OD.double() + delta, moments)

    found_OD = Lot().solve(equations, base_OD, base_OD) - base_OD.double()

    wanted_OD = sum(d @ g for d, g in zip(deltas, grams, strict=True)) @ torch.linalg.inv(sum(grams))
    torch.testing.assert_close(found_OD, wanted_OD, rtol=1e-3, atol=1e-7)


def test_scale_of_a_channel_without_energy_is_the_bases():
    equations = NormEquations(3, shift=True)
    for scale in (2.0, 4.0):
        moments = NormMoments(3)
        moments.add(torch.tensor([[0.0, 1.0, 5.0 - scale]]))
        Lot().add_norm(equations, torch.full((3,), scale), torch.zeros(3), moments)
    merged = (torch.full((3,), 3.0), torch.full((3,), 7.0))

    scale_D, shift_D = Lot().solve_norm(equations, merged, (torch.ones(3), torch.zeros(3)))

    assert scale_D.tolist() == pytest.approx([1.0, 3.0, (9 * 2 + 1 * 4) / 10])
    assert shift_D is merged[1]


def test_scaled_sink_leaves_integers_and_takes_rows():
    base = {"w": torch.zeros(4, 2), "ids": torch.arange(3)}
    sink = StateDictSink(StateDictSource(base))
    with sink:
        scaled = ScaledSink(sink, StateDictSource(base), 0.5)
        scaled.write("w", torch.ones(2, 2), slice(0, 2))
        scaled.write("w", 4 * torch.ones(2, 2), slice(2, 4))
        scaled.write("ids", base["ids"])

    assert sink.tensors["w"].tolist() == [[0.5, 0.5]] * 2 + [[2.0, 2.0]] * 2
    assert torch.equal(sink.tensors["ids"], base["ids"])


def test_lot_is_refused_without_examples():
    _, model, _ = made("clip")

    with pytest.raises(merging.MergingError, match="calibration examples"):
        merging.merge("lot", model, {"a": expert_of(model, 1)})
