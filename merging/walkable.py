"""walkable: whether a model runs its lists of blocks as a walk does, each once and fed by the one before.

Found without weights: the model's own forward runs, a block of each kind once, and blocks only answer with
noise of the shapes of that. So it takes next to nothing, whatever the depth.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from merging.contracts.backbone import Backbone, Batch
from merging.errors import TracingError
from merging.tracer import Block, answering, blocks_of, hollow, is_linear, stir_


class Look(NamedTuple):
    """What one look at a model's forward shows of its stacks."""

    reached: tuple[
        str, ...
    ] = ()  # stacks in the order in which they run; the others see nothing of the batch
    faults: Mapping[str, str] = {}  # stack -> why it cannot be walked
    several: Mapping[
        str, frozenset[str]
    ] = {}  # stack -> linears that run more than once in one of its blocks
    fixed: Mapping[
        str, frozenset[str]
    ] = {}  # stack -> linears that see as many tokens, whatever the examples


_LOOKS: WeakKeyDictionary[Backbone, dict[tuple[str, ...], Look | None]] = WeakKeyDictionary()


def look(backbone: Backbone, stacks: Sequence[str], batch: Batch | None = None) -> Look | None:
    """None where the model does not run without weights, or nobody knows on what. Remembered.

    `batch`: one to look at, of which the first example counts, where the backbone has no example of its own.
    """
    known = _LOOKS.setdefault(backbone, {})
    key = tuple(stacks)
    if known.get(key) is None and (key not in known or batch is not None):
        known[key] = _look(backbone, key, batch)
    return known[key]


def refuse_unwalkable_stacks(backbone: Backbone, stacks: Sequence[str], batch: Batch) -> None:
    """Raise TracingError if one of the stacks cannot be walked, by a look at the batch's first example where
    the backbone has none that the model takes."""
    found = look(backbone, stacks, batch)
    faults = {} if found is None else found.faults
    if told := [f"{stack}: {why}" for stack, why in faults.items() if stack in stacks]:
        raise TracingError(f"the model's blocks cannot be walked: {'; '.join(told)}", remedy=REMEDY)


def stacks_walked(backbone: Backbone, model: nn.Module) -> tuple[str, ...]:
    """The backbone's stacks; none where it has none that can be walked, for what can do without."""
    try:
        return backbone.stacks(model)
    except TracingError:
        return ()


REMEDY = (
    "Merge it with a rule that needs no data, or write a backbone that names only stacks whose blocks run "
    "once each, in order."
)


def _look(backbone: Backbone, stacks: tuple[str, ...], batch: Batch | None) -> Look | None:
    given: list[Batch] = []
    with suppress(TracingError):  # the backbone gives none
        given.append(backbone.example())
    if batch is not None:
        given.append({name: value[:1] for name, value in batch.items()})
    return next((found for one in given if (found := _look_at(backbone, stacks, one)) is not None), None)


def _look_at(backbone: Backbone, stacks: tuple[str, ...], given: Batch) -> Look | None:
    try:
        model = hollow(backbone)
        inside = tuple(f"{stack}." for stack in stacks)
        stir_(model, [name for name, _ in model.named_parameters() if not name.startswith(inside)])
        blocks = blocks_of(model, stacks)
    except Exception:  # a library's: what cannot be made will be told of by who needs it
        return None

    def forward(batch: Batch, *, quick: bool) -> tuple[_Forward, Look] | None:
        try:
            made = _Forward(model, blocks, backbone.forward_kwargs(batch), quick=quick)
            return made, _told(made)
        except Exception:  # whatever the model's own code raises, where blocks of one kind answer otherwise
            return None

    found = forward(given, quick=True) or forward(given, quick=False)
    if found is None:
        return None
    first, told = found
    two = forward({name: torch.cat([value, value]) for name, value in given.items()}, quick=first.quick)
    if two is None or told.faults:
        return told
    fixed: dict[str, frozenset[str]] = {}
    for (stack, name), count in first.tokens.items():
        if count and two[0].tokens.get((stack, name)) == count:
            fixed[stack] = fixed.get(stack, frozenset()) | {name}
    less = {name: value[:, :-1] for name, value in given.items() if "input_ids" in given and name in TEXTS}
    fewer = forward({**given, **less}, quick=first.quick) if less else None
    faults: dict[str, str] = {}
    for (stack, name), count in first.tokens.items():
        if fewer is None:
            break
        length = min(value.shape[1] for value in less.values()) + 1
        grows = two[0].tokens.get((stack, name), 0) == 2 * count
        if grows and count >= length and fewer[0].tokens.get((stack, name)) == count:
            faults[stack] = f'"{stack}.0.{name}" sees padding that the model itself puts after a text'
    return told._replace(faults=faults, fixed=fixed)


TEXTS = ("input_ids", "decoder_input_ids", "attention_mask", "decoder_attention_mask")


class _Forward:
    """The model's forward with blocks that answer with noise; one of each kind has run for its shapes."""

    def __init__(
        self, model: nn.Module, blocks: Sequence[Block], kwargs: dict[str, Any], *, quick: bool
    ) -> None:
        self.blocks, self.several = blocks, dict[str, frozenset[str]]()
        self.tokens: dict[tuple[str, str], int] = {}  # stack and linear -> tokens that it saw
        self.aside: dict[str, str] = {}  # stack -> a block that hands on more than its answer
        self._model, self._kwargs, self.quick = model, kwargs, quick
        self._answers: dict[object, Any] = {}  # kind of block -> what one answered
        inside = tuple(f"{block.stack}." for block in blocks)
        self._outside = [
            part
            for name, part in model.named_modules()
            if isinstance(part, nn.Linear) and not name.startswith(inside)
        ]

    def __call__(self, varied: frozenset[int] = frozenset()) -> list[tuple[int, list[Tensor]]]:
        """Places of the blocks as they ran, and the tensors that each was handed. The noise is the same each
        time, but for blocks at `varied` places."""
        log: list[tuple[int, list[Tensor]]] = []
        forwards = [block.module.forward for block in self.blocks]
        with ExitStack() as restore, torch.no_grad():
            for place, (block, forward) in enumerate(zip(self.blocks, forwards, strict=True)):
                answer = partial(self._answer, log, place, forward, place in varied)
                answering(restore, block.module, answer)
            for part in self._outside:
                answering(restore, part, partial(_nothing, part))
            self._model(**self._kwargs)
        return log

    def _answer(
        self,
        log: list[tuple[int, list[Tensor]]],
        place: int,
        forward: Callable[..., Any],
        is_varied: bool,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        log.append((place, [leaf.clone() for leaf in _tensors((args, kwargs))]))
        block = self.blocks[place]
        shapes = tuple(tuple(parameter.shape) for parameter in block.module.parameters())
        kind: object = (block.stack, shapes) if self.quick else place
        if kind not in self._answers:
            self._answers[kind] = self._run(block, forward, args, kwargs)
        generator = torch.Generator().manual_seed(2 * place + is_varied)
        return pytree.tree_map(partial(_noise, generator), self._answers[kind])

    def _run(
        self, block: Block, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        ran: list[str] = []
        before = _state((args, kwargs))
        with ExitStack() as restore:
            for name, part in block.module.named_modules():
                if name and is_linear(part):
                    hook = part.register_forward_pre_hook(partial(self._note, ran, block, name))
                    restore.callback(hook.remove)
            output = forward(*args, **kwargs)
        if _state((args, kwargs)) != before:
            self.aside.setdefault(block.stack, block.name)
        repeated = frozenset(name for name in ran if ran.count(name) > 1)
        self.several[block.stack] = self.several.get(block.stack, frozenset()) | repeated
        return output

    def _note(self, ran: list[str], block: Block, name: str, module: nn.Module, args: Any) -> None:
        ran.append(name)
        if args and isinstance(args[0], Tensor):
            key = block.stack, name
            self.tokens[key] = max(self.tokens.get(key, 0), args[0][..., 0].numel())


def _told(forward: _Forward) -> Look:
    blocks = forward.blocks
    log = forward()
    order = [place for place, _ in log]
    reached = tuple(dict.fromkeys(blocks[place].stack for place in order))
    faults: dict[str, str] = {}
    for stack in reached:
        if why := _disorder(blocks, order, stack):
            faults[stack] = why
        elif stack in forward.aside:
            faults[stack] = f'"{forward.aside[stack]}" leaves something for later blocks in what it is handed'
    if faults:
        return Look(reached, faults, forward.several)
    for parity in (0, 1):
        varied = frozenset(
            place for place, block in enumerate(blocks) if not block.last and place % 2 == parity
        )
        for (place, before), (_, now) in zip(log, forward(varied), strict=True):
            block = blocks[place]
            if place - 1 in varied or _alike(before, now):
                continue
            if order.index(place):
                why = f'"{block.name}" is handed what an earlier block answers, not only the last one'
            else:
                why = f'"{block.name}" is handed something else each time: the model draws at random'
            faults.setdefault(block.stack, why)
    return Look(reached, faults, forward.several)


def _disorder(blocks: Sequence[Block], order: Sequence[int], stack: str) -> str:
    """Why the blocks of a stack that runs do not run once each, in order, one after another; empty if so."""
    mine = [place for place in order if blocks[place].stack == stack]
    for place in mine:
        if (times := mine.count(place)) > 1:
            return f'"{blocks[place].name}" runs {times} times in one forward'
    if mine != sorted(mine):
        return "its blocks do not run in order"
    first = order.index(mine[0])
    other = next((place for place in order[first : first + len(mine)] if blocks[place].stack != stack), None)
    return "" if other is None else f'"{blocks[other].name}" runs between its blocks'


def _state(tree: Any) -> list[int]:
    """How much is in what a block is handed: more of it afterwards is meant for later blocks."""
    leaves = pytree.tree_leaves(tree)
    return [len(leaves), *(len(leaf) for leaf in leaves if isinstance(leaf, Collection))]


def _nothing(linear: nn.Linear, x: Tensor) -> Tensor:
    """What a linear without weights answers, without its product: a head may be as wide as a vocabulary."""
    shape = (*x.shape[:-1], linear.out_features)
    return x.new_zeros(shape) if math.prod(shape) < _LARGE else x.new_zeros(()).expand(shape)


_LARGE = 1 << 22  # entries


def _noise(generator: torch.Generator, leaf: Any) -> Any:
    if not isinstance(leaf, Tensor) or not leaf.is_floating_point():
        return leaf
    return torch.randn(leaf.shape, generator=generator).to(leaf.dtype)


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def _alike(before: Sequence[Tensor], now: Sequence[Tensor]) -> bool:
    return len(before) == len(now) and all(
        one.shape == other.shape and bool(((one == other) | ((one != one) & (other != other))).all())
        for one, other in zip(before, now, strict=True)
    )
