"""drift: how far each block of a merged or calibrated model is from the expert's, on the same examples.

Shape letters: B examples, T tokens, D hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from merging.contracts.backbone import Backbone, Batch
from merging.errors import TracingError
from merging.evaluation.forward import output

EXAMPLES = 16
"""Per task: drift is a mean over tokens and tasks, and settles with few examples."""


@dataclass(frozen=True)
class BlockDrift:
    """Means over tokens that are no padding: cos(h_m, h_e), and |h_m - h_e| / |h_e|."""

    block: str
    cosine: float
    distance: float
    tokens: int


def drift(
    expert_model: nn.Module,
    models: Mapping[str, nn.Module],
    backbone: Backbone,
    batches: Sequence[Batch],
    *,
    examples: int = EXAMPLES,
) -> dict[str, tuple[BlockDrift, ...]]:
    """For each of `models`, one entry per block in forward order, over the first `examples`."""
    names = block_names(expert_model, backbone, batches[0])
    sums = {model: [_Sums() for _ in names] for model in models}
    chosen = list(_first(batches, examples))
    walks = {name: block_features(model, backbone, chosen) for name, model in models.items()}
    for batch, expert in zip(chosen, block_features(expert_model, backbone, chosen), strict=True):
        weights = [
            _token_weights(backbone, batch, name, hidden) for name, hidden in zip(names, expert, strict=True)
        ]
        for model, walk in walks.items():
            for total, ours, theirs, weight_BT in zip(sums[model], next(walk), expert, weights, strict=True):
                total.add(ours, theirs, weight_BT)
    return {
        model: tuple(total.mean(name) for total, name in zip(totals, names, strict=True))
        for model, totals in sums.items()
    }


def block_features(model: nn.Module, backbone: Backbone, batches: Iterable[Batch]) -> Iterator[list[Tensor]]:
    """For each batch the hidden states (B T D) that leave the blocks, in forward order, on the CPU."""
    for batch in batches:
        names = block_names(model, backbone, batch)
        seen: dict[str, Tensor] = {}
        hooks = [model.get_submodule(name).register_forward_hook(_recorder(seen, name)) for name in names]
        try:
            output(model, backbone, batch)
        finally:
            for hook in hooks:
                hook.remove()
        missing = [name for name in names if name not in seen]
        if missing:
            raise TracingError(f'block "{missing[0]}" was not run by the model\'s forward')
        yield [seen[name] for name in names]


def block_names(model: nn.Module, backbone: Backbone, batch: Batch | None = None) -> tuple[str, ...]:
    """All blocks (that the batch reaches), in forward order: "encoder.layers.0", ..."""
    return tuple(
        f"{stack}.{child}"
        for stack in backbone.stacks(model)
        if batch is None or backbone.sees(batch, stack)
        for child, _ in model.get_submodule(stack).named_children()
    )


class _Sums:
    """Exact running sums over the tokens of one block."""

    def __init__(self) -> None:
        self.cosine = self.distance = self.weight = 0.0
        self.tokens = 0

    def add(self, ours_BTD: Tensor, theirs_BTD: Tensor, weight_BT: Tensor) -> None:
        ours, theirs, weight = ours_BTD.double(), theirs_BTD.double(), weight_BT.double()
        cosine = torch.nn.functional.cosine_similarity(ours, theirs, dim=-1)
        tiny = torch.finfo(torch.float32).tiny
        distance = (ours - theirs).norm(dim=-1) / theirs.norm(dim=-1).clamp_min(tiny)
        self.cosine += (cosine * weight).sum().item()
        self.distance += (distance * weight).sum().item()
        self.weight += weight.sum().item()
        self.tokens += int((weight > 0).sum())

    def mean(self, block: str) -> BlockDrift:
        weight = self.weight or 1.0
        return BlockDrift(block, self.cosine / weight, self.distance / weight, self.tokens)


def _recorder(seen: dict[str, Tensor], name: str) -> Callable[[nn.Module, Any, Any], None]:
    def record(module: nn.Module, args: Any, result: Any) -> None:
        hidden = result[0] if isinstance(result, tuple) else result
        if not isinstance(hidden, Tensor):
            raise TracingError(f'block "{name}" returned a {type(hidden).__name__}, expected hidden states')
        seen[name] = hidden.detach().cpu()

    return record


def _token_weights(backbone: Backbone, batch: Batch, block: str, hidden_BTD: Tensor) -> Tensor:
    """0 for padding, 1 for the rest. All tokens count, also in the last block."""
    stack, tokens = block.rpartition(".")[0], tuple(hidden_BTD.shape[:-1])
    weight_BT = backbone.token_weights(batch, stack, "", tokens, False)
    return torch.ones(tokens) if weight_BT is None else weight_BT.cpu()


def _first(batches: Sequence[Batch], examples: int) -> Iterator[Batch]:
    """The first so many examples; the last batch is cut."""
    left = examples
    for batch in batches:
        if left <= 0:
            return
        size = len(next(iter(batch.values())))
        yield batch if size <= left else {name: value[:left] for name, value in batch.items()}
        left -= size
