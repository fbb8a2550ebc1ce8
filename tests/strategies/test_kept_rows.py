"""Rules that walk over each parameter twice: what the first walk read stays for the second, within limits."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

import merging
from merging.checkpoints.source import StateDictSource
from merging.contracts import vectors

BASE = {"w": torch.randn(8, 4, dtype=torch.bfloat16), "v": torch.randn(8, 4, dtype=torch.bfloat16)}
EXPERT = {name: tensor + torch.randn_like(tensor) for name, tensor in BASE.items()}


def merge_counting(monkeypatch: pytest.MonkeyPatch) -> tuple[dict[str, torch.Tensor], Counter[object]]:
    reads: Counter[object] = Counter()
    read = StateDictSource.read

    def counted(source: StateDictSource, name: str, rows: slice | None = None) -> torch.Tensor:
        if rows is not None:  # the others are of the checks before
            reads[source.label, name, rows.start] += 1
        return read(source, name, rows)

    monkeypatch.setattr(vectors, "BLOCK_ELEMENTS", 8)  # two rows: four blocks a parameter and model
    with monkeypatch.context() as context:
        context.setattr(StateDictSource, "read", counted)
        return merging.merge("slerp", BASE, {"a": EXPERT}), reads


def test_a_parameter_is_read_once_where_it_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    _, reads = merge_counting(monkeypatch)

    assert set(reads.values()) == {1}
    assert len(reads) == 2 * 2 * 4  # models, parameters, blocks


def test_what_does_not_fit_is_read_again_with_the_same_result(monkeypatch: pytest.MonkeyPatch) -> None:
    once, _ = merge_counting(monkeypatch)

    monkeypatch.setattr(vectors, "KEPT_BLOCKS", 3)
    some, reads = merge_counting(monkeypatch)
    monkeypatch.setattr(vectors, "KEPT_BLOCKS", 0)
    twice, all_reads = merge_counting(monkeypatch)

    assert sum(reads.values()) == 2 * (3 + 5 * 2)  # of 8 blocks a parameter 3 are kept
    assert set(all_reads.values()) == {2}
    assert all(torch.equal(once[name], some[name]) and torch.equal(once[name], twice[name]) for name in BASE)


def test_rules_that_walk_once_keep_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vectors, "KeptRows", None)

    merged = merging.merge("task_arithmetic", BASE, {"a": EXPERT}, scale=1.0)

    assert torch.allclose(merged["w"].float(), EXPERT["w"].float(), atol=0.05)
