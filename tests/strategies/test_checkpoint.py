"""Checkpoint: a model that was merged elsewhere."""

from __future__ import annotations

import pytest
import torch

from merging.checkpoints.sink import StateDictSink
from merging.checkpoints.source import StateDictSource
from merging.contracts.models import Models
from merging.errors import CheckpointError, RuleError
from merging.strategies.checkpoint import Checkpoint

BASE = {"w": torch.zeros(8, 3), "head": torch.zeros(2), "ids": torch.arange(4)}


def run(given: dict[str, torch.Tensor] | None) -> dict[str, torch.Tensor]:
    rule = Checkpoint(model="elsewhere")
    rule.source = StateDictSource(given, "elsewhere") if given is not None else None
    models = Models(StateDictSource(BASE), {}, {}, kept=frozenset({"head"}))
    sink = StateDictSink(models.base)
    with sink:
        rule.merge(models, None, sink)
    return sink.tensors


def test_tensors_are_taken_as_they_are_and_the_rest_is_the_bases():
    merged = run({"w": torch.ones(8, 3), "head": torch.ones(5), "ids": torch.zeros(4).long()})

    assert torch.equal(merged["w"], torch.ones(8, 3))
    assert torch.equal(merged["head"], BASE["head"])
    assert torch.equal(merged["ids"], BASE["ids"])


@pytest.mark.parametrize(
    ("given", "words"), [({}, "missing"), ({"w": torch.ones(8, 4)}, r"\(8, 4\).*\(8, 3\)")]
)
def test_a_model_that_does_not_fit_is_refused(given, words):
    with pytest.raises(CheckpointError, match=words):
        run(given)


def test_an_unopened_model_is_an_error():
    with pytest.raises(RuleError, match="not opened"):
        run(None)
