"""Calibration data: what people report, and what they see here."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_tracer import leaves, walked
from tiny_models import Given, expert_of, made, opened
from torch import Tensor

from merging.averaging import AverageSource
from merging.calibrators.featcal import FeatCal
from merging.checkpoints.sink import StateDictSink
from merging.contracts.models import Models
from merging.data.task import CalibrationData
from merging.records import Records
from merging.strategies.regmean import RegMean

LENGTHS, ANSWERS = (9, 5, 7, 3), (2, 4, 1, 3)


def words(length: int, seed: int) -> Tensor:
    return torch.randint(3, 60, (1, length), generator=torch.Generator().manual_seed(seed))


def padded(sentences: list[Tensor], side: str) -> tuple[Tensor, Tensor]:
    """Ids and mask of all sentences, filled up with zeros on one side."""
    longest = max(sentence.shape[1] for sentence in sentences)
    ids = torch.zeros(len(sentences), longest, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, sentence in enumerate(sentences):
        length = sentence.shape[1]
        place = slice(0, length) if side == "right" else slice(longest - length, longest)
        ids[row, place], mask[row, place] = sentence[0], 1
    return ids, mask


def results(models: Models, *batches: dict[str, Tensor]) -> dict[str, Tensor]:
    """What RegMean and FeatCal make of these examples."""
    data = CalibrationData({task: Given(*batches) for task in models.tasks})
    found: dict[str, Tensor] = {}
    for rule in (RegMean(), FeatCal()):
        rule.precision = "float64"  # so that a difference is one of tokens, not of rounding
        sink = StateDictSink(models.base)
        with sink:
            if isinstance(rule, RegMean):
                rule.merge(models, data, sink)
            else:
                rule.calibrate(AverageSource(models), models, data, sink)
        found |= {f"{type(rule).__name__} {name}": tensor for name, tensor in sink.tensors.items()}
    return found


@pytest.mark.parametrize(("name", "side"), [("llama", "left"), ("llama", "right"), ("t5", "right")])
def test_padding_in_a_batch_changes_no_statistic(name: str, side: str) -> None:
    backbone, base, _ = made(name)
    models = opened(base, {"a": expert_of(base, 1), "b": expert_of(base, 2)}, backbone)
    sentences = [words(length, length) for length in LENGTHS]
    answers = [words(length, 100 + length) for length in ANSWERS]
    ids, mask = padded(sentences, side)
    alone: list[dict[str, Any]] = [
        {"input_ids": one, "attention_mask": torch.ones_like(one)} for one in sentences
    ]
    batch = {"input_ids": ids, "attention_mask": mask}
    if name == "t5":
        batch["decoder_input_ids"], batch["decoder_attention_mask"] = padded(answers, "right")
        for one, answer in zip(alone, answers, strict=True):
            one |= {"decoder_input_ids": answer, "decoder_attention_mask": torch.ones_like(answer)}

    together, one_by_one = results(models, batch), results(models, *alone)

    assert max(float((together[key] - one_by_one[key]).abs().max()) for key in together) < 1e-6


@pytest.mark.parametrize("name", ["llama", "gpt2", "vit", "clip", "t5"])
def test_blocks_replayed_one_by_one_get_all_arguments_of_the_forward(name: str) -> None:
    """Rotary tables, position biases and masks too, on batches of different length."""
    expected, found, _ = walked(name, Records())

    for ours, theirs in zip(found, expected, strict=True):
        for left, right in zip(leaves(ours), leaves(theirs), strict=True):
            assert torch.allclose(left, right, atol=1e-5)
