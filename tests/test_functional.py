"""A model as a function of its weights equals the model, for every kind of model, tied or not."""

from __future__ import annotations

import pytest
import torch
from tiny_models import CASES, expert_of, made

from merging.checkpoints.source import StateDictSource
from merging.data.task import LinearHead
from merging.errors import DataError, NumericalError
from merging.evaluation.forward import features
from merging.functional import FunctionalModel
from merging.streaming import load_model


@pytest.mark.parametrize("case", CASES)
def test_features_are_those_of_the_model(case, monkeypatch):
    backbone, model, batches = made(case)
    if hasattr(model, "get_output_embeddings") and model.get_output_embeddings() is not None:
        monkeypatch.setattr(type(backbone), "features", lambda self, output, batch: output.logits)
    source = StateDictSource(expert_of(model, 1))

    function = FunctionalModel(backbone, source.names())
    weights = {name: function.placed(source.read(name)) for name in function.names}

    whole = load_model(backbone, source)
    assert torch.allclose(function.features(weights, batches[0]), features(whole, backbone, batches[0]))


def test_gradients_reach_every_weight_that_the_features_hang_on():
    backbone, model, batches = made("clip")
    function = FunctionalModel(backbone, tuple(model.state_dict()))
    weights = {name: tensor.clone().requires_grad_() for name, tensor in model.state_dict().items()
               if tensor.is_floating_point()}  # fmt: skip
    rest = {name: tensor for name, tensor in model.state_dict().items() if name not in weights}

    function.features({**weights, **rest}, batches[0]).sum().backward()

    assert all(weight.grad is not None for weight in weights.values())


def test_a_head_of_another_width_is_told():
    backbone, model, batches = made("clip")
    function = FunctionalModel(backbone, tuple(model.state_dict()))

    with pytest.raises(DataError, match='task "a": the head reads 7 features, the model gives 32'):
        function.scores(model.state_dict(), batches[0], LinearHead(torch.ones(3, 7)), task="a")


def test_scores_that_are_not_finite_are_told():
    backbone, model, batches = made("clip")
    function = FunctionalModel(backbone, tuple(model.state_dict()))

    with pytest.raises(NumericalError, match='task "a" are NaN'):
        function.scores(model.state_dict(), batches[0], LinearHead(torch.full((3, 32), torch.nan)), task="a")
