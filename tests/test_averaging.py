"""The average that layer-wise rules start from."""

from __future__ import annotations

import pytest
import torch
from tiny_models import opened

from merging.averaging import AverageSource
from merging.errors import RuleError

BASE = {"w": torch.zeros(3, 2)}
EXPERTS = {"a": {"w": torch.ones(3, 2)}, "b": {"w": torch.full((3, 2), 4.0)}}


def test_it_is_weighted_whole_and_by_rows() -> None:
    source = AverageSource(opened(BASE, EXPERTS, None).weighed({"a": 2.0, "b": 1.0}))

    assert source.read("w").tolist() == [[2.0, 2.0]] * 3
    assert source.read("w", slice(1, 2)).tolist() == [[2.0, 2.0]]


def test_weights_that_add_up_to_nothing_have_no_average() -> None:
    with pytest.raises(RuleError, match="weights add up to 0"):
        AverageSource(opened(BASE, EXPERTS, None).weighed({"a": 1.0, "b": -1.0}))
