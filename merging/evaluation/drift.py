"""drift: how far each block of a merged or calibrated model is from the expert's, on the same examples.

Shape letters: B examples, T tokens, D hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from merging.checkpoints.source import CheckpointSource
from merging.contracts.backbone import Backbone, Batch
from merging.errors import TracingError
from merging.forwards import Forwards
from merging.records import Records
from merging.streaming import StreamedModel
from merging.tracer import BlockTracer, blocks_of

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
    expert: CheckpointSource,
    models: Mapping[str, CheckpointSource],
    backbone: Backbone,
    batches: Sequence[Batch],
    *,
    examples: int = EXAMPLES,
    device: torch.device | str = "cpu",
    work: Path | None = None,
) -> dict[str, tuple[BlockDrift, ...]]:
    """For each of `models`, one entry per block in forward order, over the first `examples`.

    One block of one model is held at a time, beside what lies outside its blocks; what the expert's blocks
    answer waits in memory, or on disk in `work`."""
    chosen = list(_first(batches, examples))
    records = Records(work)
    try:
        for place, (name, batch, hidden) in enumerate(
            block_features(expert, backbone, chosen, device=device)
        ):
            records.put(place, (hidden, _token_weights(backbone, chosen[batch], name, hidden)))
        return {
            model: _distances(source, backbone, chosen, records, device) for model, source in models.items()
        }
    finally:
        records.close()


def _distances(
    source: CheckpointSource,
    backbone: Backbone,
    batches: Sequence[Batch],
    records: Records,
    device: torch.device | str,
) -> tuple[BlockDrift, ...]:
    sums: dict[str, _Sums] = {}
    for place, (name, _, ours) in enumerate(block_features(source, backbone, batches, device=device)):
        theirs, weight_BT = records.get(place)
        sums.setdefault(name, _Sums()).add(ours, theirs, weight_BT)
    return tuple(total.mean(name) for name, total in sums.items())


def block_features(
    source: CheckpointSource,
    backbone: Backbone,
    batches: Sequence[Batch],
    *,
    device: torch.device | str = "cpu",
) -> Iterator[tuple[str, int, Tensor]]:
    """(block, batch, hidden states B T D that leave it, on the CPU), block by block in forward order."""
    model = StreamedModel(backbone, source.names(), device=device)
    stacks = backbone.stacks(model.module)
    blocks = blocks_of(model.module, [stack for stack in stacks if backbone.sees(batches[0], stack)])
    model.attach(source)
    model.load(without=stacks)
    tracer = BlockTracer(model.module, blocks, Forwards(backbone, batches, device), Records())
    for index, block in enumerate(blocks):
        model.load(block.name)
        for batch in range(len(batches)):
            answer = tracer.run(index, tracer.call(index, batch), {})
            tracer.record(index, batch, answer)
            hidden = answer[0] if isinstance(answer, tuple) else answer
            if not isinstance(hidden, Tensor):
                found = type(hidden).__name__
                raise TracingError(f'block "{block.name}" returned a {found}, expected hidden states')
            yield block.name, batch, hidden.cpu()
        model.release(block.name)


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
