"""drift: how far each block of a merged or calibrated model is from the expert's, on the same examples, and
how much of that the block itself does.

Shape letters: B examples, T tokens, D hidden size, N tokens that count, F final feature.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from merging.checkpoints.source import CheckpointSource
from merging.contracts.backbone import Backbone, Batch
from merging.errors import DataError, TracingError
from merging.evaluation.frechet import frechet as frechet_distance
from merging.forwards import Forwards
from merging.records import Records
from merging.stem import Tried
from merging.streaming import StreamedModel
from merging.tracer import BlockTracer, Call, blocks_of
from merging.walkable import stacks_walked

EXAMPLES = 8
"""Per task: drift is a mean over tokens and tasks, and settles with few examples."""

_TEXTS = 4  # in a batch: a language model's final output is as wide as its vocabulary
_TINY = torch.finfo(torch.float32).tiny


@dataclass(frozen=True)
class BlockDrift:
    """Means over tokens that are no padding.

    With e = h_m - h_e, what the merged block answers in the merged model less what the expert's answers in
    the expert, FeatCal (arXiv:2605.13030) splits e = m + p:

        m = f_m(h_e') - f_e(h_e')    local mismatch
        p = f_m(h_m') - f_m(h_e')    upstream propagation

    where h_m' and h_e' are what enters the block f_m in the merged model and f_e in the expert.
    """

    block: str
    cosine: float  # cos(h_m, h_e)
    distance: float  # |e| / |h_e|
    tokens: int
    local: float | None = None  # |m| / |h_e|
    upstream: float | None = None  # |p| / |h_e|
    local_share: float | None = None  # sum <m, e> / sum |e|^2; with that of p it makes 1; None where e is 0
    frechet: float | None = None  # between the tokens as Gaussians, in their own units
    frechet_relative: float | None = None  # the same, over the root mean square of |h_e|


@dataclass(frozen=True)
class OutputDrift:
    """Of the final features, which heads read: cosine, and |f_m - f_e| / |f_e|, for each example."""

    cosines: tuple[float, ...]
    distances: tuple[float, ...]


@dataclass(frozen=True)
class ModelDrift:
    """Blocks in forward order; `output` is None for models that give heads nothing to read."""

    blocks: tuple[BlockDrift, ...]
    output: OutputDrift | None = None


def drift(
    expert: CheckpointSource,
    models: Mapping[str, CheckpointSource],
    backbone: Backbone,
    batches: Sequence[Batch],
    *,
    examples: int = EXAMPLES,
    adapt: Mapping[str, Callable[[Tensor], Tensor]] | None = None,
    split: bool = True,
    frechet: bool = False,
    device: torch.device | str = "cpu",
    work: Path | None = None,
    tried: Tried | None = None,
) -> dict[str, ModelDrift]:
    """For each of `models`, over the first `examples`.

    `adapt`: model -> what is applied to its final features (B F) before heads read them. `split`: into local
    and upstream, which runs each model's blocks a second time. `frechet`: the
    distance between distributions, too, which takes a decomposition per block. `tried`: shared by calls for
    like models, what one of them found out about the stem.

    A model whose blocks cannot be walked runs as a whole, and only its final features are compared. Of others
    one block is held at a time, beside what lies outside the blocks; what enters and leaves the
    expert's blocks waits in memory, or on disk in `work`."""
    chosen = list(_first(batches, examples))
    records, tried = Records(work), tried or Tried()
    try:
        walk = _Walk(expert, backbone, chosen, device, tried)
        for place, step in enumerate(walk.steps()):
            weights_BT = _token_weights(backbone, chosen[step.batch], step.block, step.hidden)
            records.put(place, (*step.call, step.hidden, weights_BT))
        features = walk.features()
        adapted = adapt or {}
        return {
            model: _of_model(
                _Walk(source, backbone, chosen, device, tried),
                records,
                features,
                adapt=adapted.get(model, _unchanged),
                split=split,
                frechet=frechet,
            )
            for model, source in models.items()
        }
    finally:
        records.close()


def _of_model(
    walk: _Walk,
    records: Records,
    theirs: Sequence[Tensor] | None,
    *,
    adapt: Callable[[Tensor], Tensor],
    split: bool,
    frechet: bool,
) -> ModelDrift:
    rows: list[BlockDrift] = []
    sums = _Sums("", gathers=frechet)
    for place, step in enumerate(walk.steps()):
        if step.block != sums.block:
            rows += sums.means()
            sums = _Sums(step.block, gathers=frechet)
        args, kwargs, expert_BTD, weights_BT = records.get(place)
        crossed_BTD = walk.again(step, Call(args, kwargs)) if split else None
        sums.add(step.hidden, crossed_BTD, expert_BTD, weights_BT)
    rows += sums.means()
    ours = walk.features()
    if theirs is None or ours is None:
        return ModelDrift(tuple(rows))
    return ModelDrift(tuple(rows), _output([adapt(one) for one in ours], theirs))


def _output(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> OutputDrift:
    a_NF, b_NF = torch.cat(list(ours)).double(), torch.cat(list(theirs)).double()
    cosines: list[float] = torch.cosine_similarity(a_NF, b_NF, dim=-1).tolist()
    distances: list[float] = ((a_NF - b_NF).norm(dim=-1) / b_NF.norm(dim=-1).clamp_min(_TINY)).tolist()
    return OutputDrift(tuple(cosines), tuple(distances))


def block_features(
    source: CheckpointSource,
    backbone: Backbone,
    batches: Sequence[Batch],
    *,
    device: torch.device | str = "cpu",
) -> Iterator[tuple[str, int, Tensor]]:
    """(block, batch, hidden states B T D that leave it, on the CPU), block by block in forward order."""
    for step in _Walk(source, backbone, batches, device, Tried()).steps():
        yield step.block, step.batch, step.hidden


@dataclass(frozen=True)
class _Step:
    """One block on one batch: what entered it, and the hidden states (B T D, on the CPU) that left it."""

    index: int
    block: str
    batch: int
    call: Call
    hidden: Tensor


class _Walk:
    """One model over all batches, a block at a time."""

    def __init__(
        self,
        source: CheckpointSource,
        backbone: Backbone,
        batches: Sequence[Batch],
        device: torch.device | str,
        tried: Tried,
    ) -> None:
        self._backbone, self._batches, self._device = backbone, batches, torch.device(device)
        self._model = StreamedModel(backbone, source.names(), device=device)
        self._stacks = stacks_walked(backbone, self._model.module)
        seen = [stack for stack in self._stacks if backbone.sees(batches[0], stack)]
        self._blocks = blocks_of(self._model.module, seen)
        self._model.attach(source)
        forwards = Forwards(backbone, batches, device)
        self._tracer = BlockTracer(self._model.module, self._blocks, forwards, Records(), tried=tried)

    def steps(self) -> Iterator[_Step]:
        """While a step is looked at, its block's weights are there."""
        self._model.load(without=self._stacks)
        for index, block in enumerate(self._blocks):
            self._model.load(block.name)
            for batch in range(len(self._batches)):
                call = self._tracer.call(index, batch)
                answer = self._tracer.run(index, call, {})
                self._tracer.record(index, batch, answer)
                yield _Step(index, block.name, batch, call, _hidden(answer, block.name))
            self._model.release(block.name)

    def again(self, step: _Step, call: Call) -> Tensor:
        """What the step's block answers to another call (B T D)."""
        args, kwargs = pytree.tree_map(self._placed, (call.args, call.kwargs))
        return _hidden(self._tracer.run(step.index, Call(args, kwargs), {}), step.block)

    def features(self) -> list[Tensor] | None:
        """What heads read of each batch (B F, on the CPU), after all steps; None if there is no such
        thing."""
        try:
            return [
                self._backbone.features(self._tracer.finish(number), batch).float().cpu()
                for number, batch in enumerate(self._batches)
            ]
        except DataError:
            return None

    def _placed(self, leaf: object) -> object:
        return leaf.to(self._device) if isinstance(leaf, Tensor) else leaf


def _hidden(answer: object, block: str) -> Tensor:
    hidden = answer[0] if isinstance(answer, tuple) else answer
    if not isinstance(hidden, Tensor):
        found = type(hidden).__name__
        raise TracingError(f'block "{block}" returned a {found}, expected hidden states')
    return hidden.cpu()


class _Sums:
    """Exact running sums over the tokens of one block; with `gathers` it keeps these tokens, too."""

    def __init__(self, block: str, *, gathers: bool) -> None:
        self.block = block
        self._cosine = self._distance = self._local = self._upstream = self._weight = 0.0
        self._shared = self._squares = 0.0  # <m, e> and |e|^2
        self._tokens, self._split = 0, False
        self._gathered: tuple[list[Tensor], list[Tensor]] | None = ([], []) if gathers else None

    def add(
        self, ours_BTD: Tensor, crossed_BTD: Tensor | None, theirs_BTD: Tensor, weight_BT: Tensor
    ) -> None:
        """`crossed`: the model's own block on what enters the expert's, where the drift is to be split."""
        counts_BT = weight_BT > 0
        ours, theirs = (one[counts_BT].double() for one in (ours_BTD, theirs_BTD))
        weight_N = weight_BT[counts_BT].double()
        size_N = theirs.norm(dim=-1).clamp_min(_TINY)
        error = ours - theirs
        self._cosine += (torch.cosine_similarity(ours, theirs, dim=-1) * weight_N).sum().item()
        self._distance += (error.norm(dim=-1) / size_N * weight_N).sum().item()
        self._squares += (error.square().sum(-1) * weight_N).sum().item()
        self._split = crossed_BTD is not None
        if crossed_BTD is not None:
            crossed = crossed_BTD[counts_BT].double()
            local = crossed - theirs
            self._local += (local.norm(dim=-1) / size_N * weight_N).sum().item()
            self._upstream += ((ours - crossed).norm(dim=-1) / size_N * weight_N).sum().item()
            self._shared += ((local * error).sum(-1) * weight_N).sum().item()
        self._weight += weight_N.sum().item()
        self._tokens += len(weight_N)
        if self._gathered is not None:
            self._gathered[0].append(ours.float())
            self._gathered[1].append(theirs.float())

    def means(self) -> list[BlockDrift]:
        """One; none if there was no block yet."""
        if not self.block:
            return []
        weight = self._weight or 1.0
        between, relative = self._frechet()
        return [
            BlockDrift(
                self.block,
                self._cosine / weight,
                self._distance / weight,
                self._tokens,
                local=self._local / weight if self._split else None,
                upstream=self._upstream / weight if self._split else None,
                local_share=self._shared / self._squares if self._split and self._squares else None,
                frechet=between,
                frechet_relative=relative,
            )
        ]

    def _frechet(self) -> tuple[float | None, float | None]:
        if self._gathered is None or not self._tokens:
            return None, None
        ours_ND, theirs_ND = (torch.cat(one) for one in self._gathered)
        between = frechet_distance(ours_ND, theirs_ND)
        size = theirs_ND.double().square().sum(-1).mean().sqrt().item()
        return between, between / max(size, _TINY)


def _unchanged(features_BF: Tensor) -> Tensor:
    return features_BF


def _token_weights(backbone: Backbone, batch: Batch, block: str, hidden_BTD: Tensor) -> Tensor:
    """0 for padding, 1 for the rest. All tokens count, also in the last block."""
    stack, tokens = block.rpartition(".")[0], tuple(hidden_BTD.shape[:-1])
    weight_BT = backbone.token_weights(batch, stack, "", tokens, False)
    return torch.ones(tokens) if weight_BT is None else weight_BT.cpu()


def _first(batches: Sequence[Batch], examples: int) -> Iterator[Batch]:
    """The first so many examples; the last batch is cut, and texts come a few at a time."""
    left = examples
    for batch in batches:
        if left <= 0:
            return
        size = min(left, len(next(iter(batch.values()))))
        step = _TEXTS if "input_ids" in batch else size
        for start in range(0, size, step):
            stop = min(start + step, size)
            yield {name: value[start:stop] for name, value in batch.items()}
        left -= size
