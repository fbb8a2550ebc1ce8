"""Sizes of a run: from headers, the skeleton, and one example run through blocks that have no weights."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from merging.contracts import vectors
from merging.costs.alive import AliveBytes
from merging.costs.sizes import BlockSizes, FeedSizes, Sizes, Walk
from merging.lean import lean_
from merging.records import DEFAULT_MEMORY, Records
from merging.threads import threads_over
from merging.tracer import Block, BlockTracer, blocks_of, hollow, is_transposed
from merging.walkable import stacks_walked

if TYPE_CHECKING:
    from merging.checkpoints.source import CheckpointSource
    from merging.contracts.backbone import Backbone, Batch
    from merging.contracts.models import Models
    from merging.data.task import Task
    from merging.spec import OutputSpec


def sizes_of(models: Models, output_bytes: int, walk: Walk | None = None) -> Sizes:
    """`walk`: only for methods that walk the model."""
    base = models.base
    specs = [base.spec(name) for name in base.names()]
    floating = [spec for spec in specs if spec.dtype.is_floating_point]
    sources = (base, *models.experts.values())
    return Sizes(
        experts=len(models.experts),
        tensors=tuple(spec.shape for spec in floating),
        base_bytes=sum(spec.bytes for spec in specs),
        expert_bytes=sum(one.spec(name).bytes for one in models.experts.values() for name in one.names()),
        output_bytes=output_bytes,
        itemsize=max((spec.dtype.itemsize for spec in floating), default=4),
        threads=threads_over(sources),
        row_block=vectors.usual_row_block(len(models.experts) + 1),
        activation_memory=DEFAULT_MEMORY,
        walk=walk,
    )


def walk_of(backbone: Backbone, tasks: Mapping[str, Task]) -> Walk | None:
    """None where there are no examples. Blocks that are made alike are looked at once."""
    given = [task.calibration.batches() for task in tasks.values() if task.calibration is not None]
    if not given:
        return None
    longest = max((_longest(batches) for batches in given), key=_bytes)
    example = {name: value[:1] for name, value in longest.items()}
    model = lean_(hollow(backbone))
    stacks = tuple(stack for stack in stacks_walked(backbone, model) if backbone.sees(example, stack))
    blocks = blocks_of(model, stacks)
    if not blocks:
        return None
    looked = _Looked(model, blocks, backbone.forward_kwargs(example))
    found = tuple(looked.at(index) for index in range(len(blocks)))
    inside = sum(block.elements for block in found)
    every = blocks_of(model, backbone.stacks(model))
    everywhere = sum(_elements(block.module) for block in every)
    return (
        Walk(
            outside=_elements(model) - everywhere,
            blocks=found,
            examples=sum(len(task.calibration) for task in tasks.values() if task.calibration is not None),
            batch=max(len(next(iter(batches[0].values()))) for batches in given),
            stem=looked.stem,
            inputs=_bytes(example),
        )
        if inside
        else None
    )


def delivered_bytes(base: CheckpointSource, output: OutputSpec) -> int:
    """Of one checkpoint; of an adapter at least: what else has changed is not known beforehand."""
    specs = [base.spec(name) for name in base.names()]
    if output.form == "model":
        asked = None if output.dtype == "base" else getattr(torch, output.dtype)
        return sum(
            spec.elements * asked.itemsize if asked and spec.dtype.is_floating_point else spec.bytes
            for spec in specs
        )
    rank = output.adapter_rank if isinstance(output.adapter_rank, int) else 0
    itemsize = 4 if output.dtype == "base" else getattr(torch, output.dtype).itemsize
    shapes = [spec.shape for spec in specs if len(spec.shape) == 2]
    return sum(min(rank, *shape) * sum(shape) * itemsize for shape in shapes)


class _Looked:
    """Runs blocks of a hollow model on one example, and measures what that takes."""

    def __init__(self, model: nn.Module, blocks: tuple[Block, ...], kwargs: dict[str, Any]) -> None:
        self._blocks, self.stem = blocks, 0.0
        self._tracer = BlockTracer(model, blocks, [kwargs], Records())
        self._known: dict[object, tuple[BlockSizes, Any]] = {}

    def at(self, index: int) -> BlockSizes:
        block = self._blocks[index]
        kind = block.stack, tuple(tuple(one.shape) for one in block.module.parameters())
        if kind not in self._known:
            self._known[kind] = self._look(index)
        sizes, output = self._known[kind]
        self._tracer.record(index, 0, output)  # of the right shape, which is all that the next one needs
        return sizes

    def _look(self, index: int) -> tuple[BlockSizes, Any]:
        from torch.utils.flop_counter import FlopCounterMode  # which loads a compiler, where there is one

        module = self._blocks[index].module
        with FlopCounterMode(display=False) as counted:
            call = self._tracer.call(index, 0)
        if index == 0:
            self.stem = float(counted.get_total_flops())
        layout = self._tracer.layout(index, 0)
        with FlopCounterMode(display=False) as counted, AliveBytes() as alive:
            output = self._tracer.run(index, call, {})
        inputs = _bytes_of((call.args, call.kwargs))
        sizes = BlockSizes(
            elements=_elements(module),
            feeds=tuple(_feed(module, feed.features, feed.linears) for feed in layout.feeds),
            tokens=max((_count(feed.tokens) for feed in layout.feeds), default=0),
            operations=float(counted.get_total_flops()),
            alive=inputs + alive.most,
            output=_bytes_of(output),
        )
        return sizes, output


def _feed(module: nn.Module, inputs: int, linears: Iterable[str]) -> FeedSizes:
    outputs = 0
    for linear in linears:
        part = module.get_submodule(linear)
        outputs += int(part.get_parameter("weight").shape[1 if is_transposed(part) else 0])
    return FeedSizes(inputs, outputs, len(tuple(linears)))


def _longest(batches: Any) -> Batch:
    """The batch with most to compute; of texts all are looked at, of others the first stands for all."""
    first: Batch = batches[0]
    return max(batches, key=_bytes) if "input_ids" in first else first


def _bytes(batch: Mapping[str, Tensor]) -> int:
    """Of one example."""
    return sum(value[:1].numel() * value.itemsize for value in batch.values())


def _bytes_of(tree: Any) -> int:
    return sum(leaf.nbytes for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor))


def _elements(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _count(tokens: tuple[int, ...]) -> int:
    total = 1
    for size in tokens:
        total *= size
    return total
