"""Every parameter of every kind of model has one fate, foretold by the plan and found by the run."""

from __future__ import annotations

from collections import Counter

import pytest
from routed_models import ROUTED, near, routed_model, stored
from tiny_models import CASES, expert_of, made, opened, same_data, tokens

from merging.averaging import AverageSource
from merging.calibrators.featcal import FeatCal
from merging.checkpoints.parts import Parts
from merging.checkpoints.sink import StateDictSink
from merging.contracts.models import Models
from merging.data.task import CalibrationData
from merging.fates import fates, foreseen
from merging.layer_settings import LayerSettings
from merging.layerwise import LayerwiseMerger
from merging.strategies.lot import Lot
from merging.strategies.regmean import RegMean

RULES = {"regmean": RegMean, "lot": Lot, "featcal": FeatCal}


def two_experts(name: str) -> tuple[Models, CalibrationData]:
    if name in ROUTED:
        backbone, model = routed_model(name)
        base, batches = stored(model), [tokens(6, 11)]
        experts = {"a": near(base, 1), "b": near(base, 2)}
    else:
        backbone, model, batches = made(name)
        base, experts = model.state_dict(), {"a": expert_of(model, 1), "b": expert_of(model, 2)}
    return opened(base, experts, backbone), same_data(experts, *batches)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", [*CASES, *ROUTED])
def test_what_is_foreseen_is_what_a_run_does(name: str, rule: str) -> None:
    models, data = two_experts(name)
    method = RULES[rule]()
    sink = StateDictSink(models.base)

    solved, left = foreseen(method, models, models.backbone.skeleton())
    with sink:
        if isinstance(method, LayerwiseMerger):
            notes = method.merge(models, data, sink)
        else:
            notes = method.calibrate(AverageSource(models), models, data, sink)

    assert sorted(notes["solved"]) == sorted(solved)
    assert notes["left"] == left
    assert sorted([*solved, *left]) == sorted(models.base.names())
    assert all(left.values())


REASONS = {
    "vit": {"outside the blocks": 8},
    "clip": {"outside the blocks": 7},
    "t5": {"outside the blocks": 6, "neither a linear nor a norm: Embedding": 2},
    "llama": {"outside the blocks": 3},
    "bert": {"outside the blocks": 7},
    "gpt2": {"outside the blocks": 5},
    "bart": {"outside the blocks": 9},
    "whisper_encoder": {"outside the blocks": 7},
    "mixtral": {"outside the blocks": 3},
    "dinov2": {"outside the blocks": 7, "neither a linear nor a norm: Dinov2LayerScale": 6},
}


@pytest.mark.parametrize("name", REASONS)
def test_featcal_solves_all_that_is_linear_or_a_norm_and_says_of_the_rest_why_not(name: str) -> None:
    models, _ = two_experts(name)

    solved, left = foreseen(FeatCal(), models, models.backbone.skeleton())
    found = fates(models, Parts({}), LayerSettings(), set(solved), left)

    assert tuple(found) == models.base.names()
    reasons = Counter(fate.reason for fate in found.values() if fate.state == "merged")
    assert reasons == REASONS[name]
    blocks = [name for name, fate in found.items() if fate.state == "solved"]
    assert all(any(part.isdecimal() for part in name.split(".")) for name in blocks)
