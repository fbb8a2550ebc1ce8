"""ActivationTracer: walks one model over fixed batches, block by block, with the model's own forward.

Shape letters: B examples, T tokens, D features.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from merging.contracts.backbone import Backbone
from merging.errors import MergingError, TracingError
from merging.records import Records


@dataclass(frozen=True)
class Block:
    """One of a stack's like layers."""

    stack: str
    name: str
    module: nn.Module
    last: bool  # the last of its stack


class Call(NamedTuple):
    """What the model hands to a block."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class Feed(NamedTuple):
    """One tensor that enters one or several linears of a block; names are relative to the block."""

    linears: tuple[str, ...]
    features: int
    tokens: tuple[int, ...]  # shape of the first batch without its last axis


class Layout(NamedTuple):
    """What a block is made of, in the order in which it runs."""

    feeds: tuple[Feed, ...]
    norms: tuple[str, ...]


Observer = Callable[[Tensor], None]


class ActivationTracer(ABC):
    """Walks one model over fixed batches, in forward order."""

    blocks: tuple[Block, ...]

    @abstractmethod
    def call(self, block: int, batch: int) -> Call:
        """What the model itself would hand to the block, given all that is recorded. May be asked any number
        of times."""

    @abstractmethod
    def run(
        self, block: int, call: Call, observe: Mapping[str, Observer], *, until: str | None = None
    ) -> Any:
        """Run the block; observers get the inputs of the submodules they are named after.

        With `until`, the run ends once that submodule's input was observed, and None is returned.
        """

    @abstractmethod
    def record(self, block: int, batch: int, output: Any) -> None:
        """Take `output` as what the block answers from now on."""

    @abstractmethod
    def finish(self, batch: int) -> Any:
        """The model's output, all blocks being recorded; no block is run again."""


class _Reached(BaseException):
    """Stops a forward at the wanted place; not an Exception, so that no parent can swallow it."""

    def __init__(self, call: Call | None = None) -> None:
        self.call = call


class BlockTracer(ActivationTracer):
    """The tracer of all models whose blocks lie in lists.

    For every call the model's own forward runs: finished blocks only answer with their stack's latest output,
    and the wanted block stops the forward and hands over its arguments. Since that latest output is a true
    value, whatever the model does between blocks or stacks is right, and no architecture needs code of its
    own."""

    def __init__(
        self,
        model: nn.Module,
        blocks: Sequence[Block],
        batches: Sequence[Mapping[str, Any]],
        records: Records,
        *,
        stream: str = "",
    ) -> None:
        """`batches`: keyword arguments of the forward; `stream` tells this walk's records from others' in
        `records`."""
        self.model, self.blocks, self.batches = model, tuple(blocks), batches
        self._records, self._stream = records, stream

    def call(self, block: int, batch: int) -> Call:
        wanted = self.blocks[block]

        def hand_over(*args: Any, **kwargs: Any) -> Any:
            raise _Reached(Call(args, kwargs))

        with ExitStack() as restore, torch.no_grad():
            self._answer(restore, block, batch)
            _replace_forward(restore, wanted.module, hand_over)
            found: Call | None = None
            try:
                self.model(**self.batches[batch])
            except _Reached as reached:
                found = reached.call
            except MergingError:
                raise
            except Exception as error:  # whatever the model's own code raises
                raise self._failed(batch, error) from error
        if found is not None:
            return found
        raise TracingError(
            f'the forward ended without reaching block "{wanted.name}"',
            remedy="Blocks must run once, in order; layer drop, early exit and caches prevent that.",
        )

    def _failed(self, batch: int, error: Exception) -> TracingError:
        inputs = self.batches[batch].items()
        shapes = ", ".join(
            f"{name} {tuple(value.shape)}" for name, value in inputs if isinstance(value, Tensor)
        )
        return TracingError(
            f"the model's forward failed on {self._stream or 'a model'}, batch {batch} ({shapes}): "
            f"{type(error).__name__}: {error}",
            remedy="Check the names, shapes and dtypes of this task's inputs against what the model takes.",
        )

    def run(
        self, block: int, call: Call, observe: Mapping[str, Observer], *, until: str | None = None
    ) -> Any:
        module = self.blocks[block].module
        with ExitStack() as restore, torch.no_grad():
            for name, observer in observe.items():
                hook = _input_hook(observer, stop=name == until)
                handle = module.get_submodule(name).register_forward_pre_hook(hook, with_kwargs=True)
                restore.callback(handle.remove)
            try:
                return module(*call.args, **call.kwargs)
            except _Reached:
                return None

    def record(self, block: int, batch: int, output: Any) -> None:
        self._records.put((self._stream, batch, self.blocks[block].stack), output)

    def finish(self, batch: int) -> Any:
        with ExitStack() as restore, torch.no_grad():
            self._answer(restore, len(self.blocks), batch)
            return self.model(**self.batches[batch])

    def layout(self, block: int, batch: int) -> Layout:
        """Feeds and norms of a block, found by running it once: linears that are handed the same tensor share
        a feed."""
        module = self.blocks[block].module
        seen: list[tuple[str, Tensor]] = []
        names = [
            name for name, child in module.named_modules() if name and (is_linear(child) or is_norm(child))
        ]

        def observer(name: str) -> Observer:
            return lambda x: seen.append((name, x))  # kept alive, so that no two tensors share an address

        self.run(block, self.call(block, batch), {name: observer(name) for name in names})
        feeds: dict[object, list[str]] = {}
        shapes: dict[str, tuple[int, ...]] = {}
        norms: list[str] = []
        for name, x in seen:
            shapes[name] = tuple(x.shape)
            if not is_linear(module.get_submodule(name)):
                norms.append(name)
            else:
                key = (x.data_ptr(), x.shape, x.stride(), x._version)
                feeds.setdefault(key, []).append(name)
        found = [
            Feed(tuple(dict.fromkeys(linears)), shapes[linears[0]][-1], shapes[linears[0]][:-1])
            for linears in feeds.values()
        ]
        return Layout(tuple(found), tuple(dict.fromkeys(norms)))

    def _answer(self, restore: ExitStack, finished: int, batch: int) -> None:
        latest = {block.stack: (self._stream, batch, block.stack) for block in self.blocks[:finished]}
        for stack, key in latest.items():
            if key not in self._records:
                raise TracingError(f'no output of stack "{stack}" is recorded for batch {batch}')
        for block in self.blocks[:finished]:
            key = latest[block.stack]
            _replace_forward(restore, block.module, lambda *_, key=key, **__: self._records.get(key))


def feeds_of(backbone: Backbone) -> dict[str, tuple[Feed, ...]]:
    """Stack -> feeds of its first block, found by running that block once. No weights are read, nor held."""
    model = backbone.skeleton()
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.is_meta:
                hollow = torch.zeros(()).expand(parameter.shape)  # takes no memory, whatever its shape
                module._parameters[name] = nn.Parameter(hollow, requires_grad=False)
    blocks = blocks_of(model, backbone.stacks(model))
    tracer = BlockTracer(model, blocks, [backbone.forward_kwargs(backbone.example())], Records())
    found: dict[str, tuple[Feed, ...]] = {}
    for index, block in enumerate(blocks):
        if block.stack not in found:
            found[block.stack] = tracer.layout(index, 0).feeds
            first = tracer.run(index, tracer.call(index, 0), {})
        if block.last:
            tracer.record(index, 0, first)  # of the right shape, which is all that the next stack needs
    return found


def blocks_of(model: nn.Module, stacks: Sequence[str]) -> tuple[Block, ...]:
    """All blocks of the named stacks, in forward order."""
    found = []
    for stack in stacks:
        modules = list(model.get_submodule(stack).children())
        for index, module in enumerate(modules):
            found.append(Block(stack, f"{stack}.{index}", module, last=index == len(modules) - 1))
    return tuple(found)


def is_linear(module: nn.Module) -> bool:
    """nn.Linear, or GPT-2's Conv1D, which is one with its weight transposed."""
    return isinstance(module, nn.Linear) or is_transposed(module)


def is_transposed(module: nn.Module) -> bool:
    """Whether the weight is stored inputs x outputs, as transformers' Conv1D does."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf")


def is_norm(module: nn.Module) -> bool:
    """LayerNorm, RMSNorm and their like: a scale per channel, maybe a shift, and nothing else."""
    parameters = dict(module.named_parameters())
    like = isinstance(module, nn.LayerNorm) or type(module).__name__.endswith("Norm")
    return (
        like
        and parameters.keys() <= {"weight", "bias"}
        and "weight" in parameters
        and parameters["weight"].ndim == 1
    )


def _replace_forward(restore: ExitStack, module: nn.Module, forward: Callable[..., Any]) -> None:
    """Until `restore` unwinds, `module` answers with `forward`; an earlier instance attribute comes back."""
    had, before = "forward" in module.__dict__, module.__dict__.get("forward")

    def put_back() -> None:
        if had:
            module.__dict__["forward"] = before
        else:
            module.__dict__.pop("forward", None)

    restore.callback(put_back)
    module.__dict__["forward"] = forward


def _input_hook(observer: Observer, *, stop: bool) -> Callable[..., None]:
    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        observer(args[0] if args else next(value for value in kwargs.values() if isinstance(value, Tensor)))
        if stop:
            raise _Reached

    return hook
