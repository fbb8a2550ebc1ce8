"""How far a merged checkpoint is from the exact merge.

`python -m benchmarks.oracle RULE MERGED BASE EXPERT...` computes the rule anew in float64, tensor by
tensor, and rounds once to the stored dtype. It prints as JSON: the share of entries that are not the
correctly rounded ones; the error of the merged delta (relative, Frobenius); and what correct rounding
alone costs, the floor of that error. Imports torch, so the tables run it as a process of its own.

Shape letters: N experts, S the shape of a parameter.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor

from benchmarks.settings import DENSITY, SCALE

_NEAR = 0.01  # entries this close to a trim's threshold may fall on either side of it, and are left out


class Exact(NamedTuple):
    """The exact merge of one parameter, and which of its entries can be compared."""

    merged_S: Tensor
    sure_S: Tensor | None = None


def average(base_S: Tensor, experts_NS: Tensor) -> Exact:
    return Exact(experts_NS.mean(0))


def task_arithmetic(base_S: Tensor, experts_NS: Tensor) -> Exact:
    return Exact(base_S + SCALE * (experts_NS - base_S).sum(0))


def slerp(base_S: Tensor, experts_NS: Tensor) -> Exact:
    """Half way from the base to the first expert."""
    first_S = experts_NS[0]
    cosine = (base_S / base_S.norm() * (first_S / first_S.norm())).sum()
    if cosine.abs() > 0.9995:
        return Exact(0.5 * (base_S + first_S))
    theta = torch.arccos(cosine)
    return Exact(torch.sin(theta / 2) / torch.sin(theta) * (base_S + first_S))


def model_stock(base_S: Tensor, experts_NS: Tensor) -> Exact:
    deltas_NE = (experts_NS - base_S).flatten(1)
    units_NE = deltas_NE / deltas_NE.norm(dim=1, keepdim=True).clamp_min(1e-12)
    count = len(deltas_NE)
    cosine = ((units_NE @ units_NE.T).sum() - count) / (count * (count - 1))
    t = count * cosine / (1 + (count - 1) * cosine)
    return Exact(t * experts_NS.mean(0) + (1 - t) * base_S)


def ties(base_S: Tensor, experts_NS: Tensor) -> Exact:
    """Trimmed tensor by tensor; the mean of what agrees with the sign of the sum, + where the sum is 0."""
    deltas_NS = experts_NS - base_S
    sure_S = torch.ones_like(base_S, dtype=torch.bool)
    kept_NS = torch.zeros_like(deltas_NS)
    for number, delta_S in enumerate(deltas_NS):
        size_S = delta_S.abs()
        count = max(1, int(DENSITY * size_S.numel()))
        threshold = size_S.flatten().kthvalue(size_S.numel() - count + 1).values
        sure_S &= (size_S - threshold).abs() > _NEAR * threshold
        kept_NS[number] = torch.where(size_S >= threshold, delta_S, 0)
    elected_S = torch.where(kept_NS.sum(0) >= 0, 1.0, -1.0)
    agrees_NS = kept_NS.sign() == elected_S
    merged_S = (kept_NS * agrees_NS).sum(0) / agrees_NS.sum(0).clamp_min(1)
    return Exact(base_S + merged_S, sure_S)


RULES = {rule.__name__: rule for rule in (average, task_arithmetic, slerp, model_stock, ties)}


def error(rule: str, base: Path, experts: Sequence[Path], merged: Path, limit: int) -> dict[str, float]:
    """Over the first `limit` tensors."""
    differing = compared = 0
    squared = rounding = size = 0.0
    with ExitStack() as files:
        start, *others, result = (_places(folder, files) for folder in (base, *experts, merged))
        for name in list(start)[:limit]:
            base_S = _read(start, name)
            experts_NS = torch.stack([_read(other, name) for other in others])
            exact = RULES[rule](base_S, experts_NS)
            stored_S = result[name].get_tensor(name)
            sure_S = torch.ones_like(base_S, dtype=torch.bool) if exact.sure_S is None else exact.sure_S
            rounded_S = exact.merged_S.to(stored_S.dtype)
            differing += int(((stored_S != rounded_S) & sure_S).sum())
            compared += int(sure_S.sum())
            squared += float((stored_S.double() - exact.merged_S)[sure_S].square().sum())
            rounding += float((rounded_S.double() - exact.merged_S)[sure_S].square().sum())
            size += float((exact.merged_S - base_S)[sure_S].square().sum())
    return {
        "differing": differing / compared,
        "error": (squared / size) ** 0.5,
        "rounding": (rounding / size) ** 0.5,
    }


def _places(folder: Path, files: ExitStack) -> Mapping[str, safe_open]:
    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        opened = files.enter_context(safe_open(file, "pt"))
        found.update(dict.fromkeys(opened.keys(), opened))
    return found


def _read(places: Mapping[str, safe_open], name: str) -> Tensor:
    tensor: Tensor = places[name].get_tensor(name)
    return tensor.double()


def main(words: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.oracle")
    parser.add_argument("rule", choices=RULES)
    parser.add_argument("merged", type=Path)
    parser.add_argument("base", type=Path)
    parser.add_argument("experts", type=Path, nargs="+")
    parser.add_argument("--limit", type=int, default=24, help="how many tensors are compared")
    asked = parser.parse_args(words)
    print(json.dumps(error(asked.rule, asked.base, asked.experts, asked.merged, asked.limit)))


if __name__ == "__main__":
    main(sys.argv[1:])
