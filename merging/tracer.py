"""ActivationTracer: walks one model over fixed batches, block by block, with the model's own forward.

Shape letters: B examples, T tokens, D features.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from merging.contracts.backbone import Backbone
from merging.errors import MergingError, TracingError
from merging.records import Records
from merging.stem import Stem, Tried, hollow_input, same


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
    order: tuple[str, ...] = ()  # linears and norms that run once, as they run
    untouched: frozenset[str] = frozenset()  # linears and norms whose input the block leaves as it was
    several: frozenset[str] = frozenset()  # linears that run more than once, which have no feed

    def without(self, linears: Container[str]) -> Layout:
        """The same with no feed for these linears."""
        left = ([name for name in feed.linears if name not in linears] for feed in self.feeds)
        feeds = zip(self.feeds, left, strict=True)
        return self._replace(feeds=tuple(feed._replace(linears=tuple(some)) for feed, some in feeds if some))

    def last_of(self, names: Iterable[str]) -> str | None:
        """The one that runs last; None where that is not known."""
        wanted = set(names)
        if not wanted <= set(self.order):
            return None
        return next((name for name in reversed(self.order) if name in wanted), None)


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
        self,
        block: int,
        call: Call,
        observe: Mapping[str, Observer],
        *,
        until: str | None = None,
        answers: Mapping[str, Observer] | None = None,
    ) -> Any:
        """Run the block; observers get the inputs of the submodules they are named after, and those of
        `answers` their outputs.

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
        tried: Tried | None = None,
    ) -> None:
        """`batches`: keyword arguments of the forward; `stream` tells this walk's records from others' in
        `records`. `tried`: shared by walks of like models, what one of them found out about the stem."""
        self.model, self.blocks, self.batches = model, tuple(blocks), batches
        self._records, self._stream = records, stream
        self._stem = Stem(model, [block.name for block in self.blocks])
        self._tried = Tried() if tried is None else tried
        self._like_others: dict[int, bool] = {}  # batch -> whether a hollow stem serves it, too
        self._hollow_inputs: dict[int, dict[str, Any]] = {}  # batch -> its arguments, large ones all zeros

    def call(self, block: int, batch: int) -> Call:
        if block == 0:
            with ExitStack() as restore:
                self._stem.watch(restore, batch)
                inputs = self.batches[batch]
                self._hollow_inputs[batch] = {name: hollow_input(value) for name, value in inputs.items()}
                return self._call(block, batch, inputs)
        if batch not in self._stem or self._tried.fails(block) or not self._like_others.get(batch, True):
            return self._call(block, batch)
        if block in self._tried and batch in self._like_others:
            return self._hollow_call(block, batch) or self._call(block, batch)
        true = self._call(block, batch)
        if same(true, self._hollow_call(block, batch)):
            self._tried[block] = self._like_others[batch] = True
        elif block in self._tried:
            self._like_others[batch] = False
        else:
            self._tried[block] = False
        return true

    def _hollow_call(self, block: int, batch: int) -> Call | None:
        """The same, at less cost, where the values of what runs before the first block do not matter; None
        where the model cannot do without them."""
        try:
            with ExitStack() as restore:
                self._stem.hollow(restore, batch)
                return self._call(block, batch, self._hollow_inputs[batch])
        except TracingError:
            return None

    def _call(self, block: int, batch: int, inputs: Mapping[str, Any] | None = None) -> Call:
        wanted = self.blocks[block]

        def hand_over(*args: Any, **kwargs: Any) -> Any:
            raise _Reached(Call(args, kwargs))

        with ExitStack() as restore, torch.no_grad():
            self._answer(restore, block, batch)
            answering(restore, wanted.module, hand_over)
            found: Call | None = None
            try:
                self.model(**(self.batches[batch] if inputs is None else inputs))
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
        self,
        block: int,
        call: Call,
        observe: Mapping[str, Observer],
        *,
        until: str | None = None,
        answers: Mapping[str, Observer] | None = None,
    ) -> Any:
        module = self.blocks[block].module
        with ExitStack() as restore, torch.no_grad():
            for name, observer in (answers or {}).items():
                handle = module.get_submodule(name).register_forward_hook(_output_hook(observer))
                restore.callback(handle.remove)
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
        a feed. One that runs several times has several inputs, not all of them tokens of the batch (DeBERTa
        v3 puts its relative positions through q and k): it is in no feed."""
        module = self.blocks[block].module
        seen: list[tuple[str, Tensor, int]] = []
        names = [
            name for name, child in module.named_modules() if name and (is_linear(child) or is_norm(child))
        ]

        def observer(name: str) -> Observer:
            # kept alive, so that no two tensors share an address
            return lambda x: seen.append((name, x, x._version))

        self.run(block, self.call(block, batch), {name: observer(name) for name in names})
        feeds: dict[object, list[str]] = {}
        shapes: dict[str, tuple[int, ...]] = {}
        norms: list[str] = []
        ran = Counter(name for name, _, _ in seen)
        for name, x, version in seen:
            shapes[name] = tuple(x.shape)
            if not is_linear(module.get_submodule(name)):
                norms.append(name)
            elif ran[name] == 1:
                same = x.data_ptr() if x.numel() else id(x)  # no tokens, no address
                feeds.setdefault((same, x.shape, x.stride(), version), []).append(name)
        found = [
            Feed(tuple(linears), shapes[linears[0]][-1], shapes[linears[0]][:-1])
            for linears in feeds.values()
        ]
        touched = {name for name, x, version in seen if x._version != version}
        return Layout(
            tuple(found),
            tuple(dict.fromkeys(norms)),
            tuple(name for name, _, _ in seen if ran[name] == 1),
            frozenset(shapes) - touched,
            frozenset(name for name in ran if ran[name] > 1 and is_linear(module.get_submodule(name))),
        )

    def _answer(self, restore: ExitStack, finished: int, batch: int) -> None:
        given: dict[str, _Given] = {}  # stack -> what its blocks answer in this forward
        for block in self.blocks[:finished]:
            answer = partial(self._latest, given, block.stack, batch)
            answering(restore, block.module, answer)

    def _latest(self, given: dict[str, _Given], stack: str, batch: int, *_: Any, **__: Any) -> Any:
        """What a finished block answers; asked only of stacks that the batch reaches. One copy serves all
        blocks of a stack, until the model edits it in place."""
        if stack in given and not given[stack].edited():
            return given[stack].value
        key = (self._stream, batch, stack)
        if key not in self._records:
            raise TracingError(f'no output of stack "{stack}" is recorded for batch {batch}')
        given[stack] = _Given(self._records.get(key))
        return given[stack].value


class _Given:
    """An answer, and whether its tensors are still as they were."""

    def __init__(self, value: Any) -> None:
        self.value = value
        self._leaves = [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]
        self._versions = [leaf._version for leaf in self._leaves]

    def edited(self) -> bool:
        return self._versions != [leaf._version for leaf in self._leaves]


def feeds_of(backbone: Backbone) -> dict[str, tuple[Feed, ...]]:
    """Stack -> feeds of its first block, found by running that block once. No weights are read, nor held."""
    model = hollow(backbone)
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


def hollow(backbone: Backbone) -> nn.Module:
    """The model with a 0 for every weight, which takes no memory, whatever its shape: runs, and means
    nothing."""
    model = backbone.skeleton()
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.is_meta:
                zeros = torch.zeros(()).expand(parameter.shape)
                module._parameters[name] = nn.Parameter(zeros, requires_grad=False)
        config = getattr(module, "config", None)
        if getattr(config, "_experts_implementation", None) not in (None, "eager"):
            own: Any = deepcopy(config)  # the true models share it
            own._experts_implementation = "eager"  # grouped products refuse what takes no memory
            module.config = own
    return model


def stir_(model: nn.Module, names: Iterable[str]) -> None:
    """Noise, which takes no memory either, for these parameters of a hollow model: neighbours along any axis
    share it, so that one is the other moved by one."""
    for number, name in enumerate(names):
        path, _, leaf = name.rpartition(".")
        parameter = model.get_parameter(name)
        noise = torch.randn(sum(parameter.shape) + 1, generator=torch.Generator().manual_seed(number))
        stirred = torch.as_strided(noise, parameter.shape, [1] * parameter.ndim)
        model.get_submodule(path)._parameters[leaf] = nn.Parameter(stirred, requires_grad=False)


def blocks_of(model: nn.Module, stacks: Sequence[str]) -> tuple[Block, ...]:
    """All blocks of the named stacks, in forward order."""
    found = []
    for stack in stacks:
        # not children(), which passes over a module that is there a second time
        modules = [one for one in model.get_submodule(stack)._modules.values() if one is not None]
        for index, module in enumerate(modules):
            found.append(Block(stack, f"{stack}.{index}", module, last=index == len(modules) - 1))
    return tuple(found)


def is_linear(module: nn.Module) -> bool:
    """nn.Linear, GPT-2's Conv1D, which is one with its weight transposed, or a router's scores."""
    return isinstance(module, nn.Linear) or is_transposed(module) or _is_router(module)


def is_transposed(module: nn.Module) -> bool:
    """Whether the weight is stored inputs x outputs, as transformers' Conv1D does."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf")


def _is_router(module: nn.Module) -> bool:
    """What scores the experts for each token in transformers' models: a linear, and the choice by it."""
    return type(module).__name__.endswith("Router") and _has_only_weight_and_bias(module, dimensions=2)


def is_norm(module: nn.Module) -> bool:
    """LayerNorm, RMSNorm and their like: a scale per channel, maybe a shift, and nothing else."""
    like = isinstance(module, nn.LayerNorm) or type(module).__name__.endswith("Norm")
    return like and _has_only_weight_and_bias(module, dimensions=1)


def _has_only_weight_and_bias(module: nn.Module, *, dimensions: int) -> bool:
    """Whether its parameters are a weight of so many axes and perhaps a bias."""
    parameters = dict(module.named_parameters())
    weight = parameters.get("weight")
    return weight is not None and weight.ndim == dimensions and parameters.keys() <= {"weight", "bias"}


def answering(restore: ExitStack, module: nn.Module, forward: Callable[..., Any]) -> None:
    """Until `restore` unwinds, `module` answers with `forward`; an earlier instance attribute comes back."""
    had, before = "forward" in module.__dict__, module.__dict__.get("forward")

    def put_back() -> None:
        if had:
            module.__dict__["forward"] = before
        else:
            module.__dict__.pop("forward", None)

    restore.callback(put_back)
    module.__dict__["forward"] = forward


def _output_hook(observer: Observer) -> Callable[..., None]:
    def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        observer(output)

    return hook


def _input_hook(observer: Observer, *, stop: bool) -> Callable[..., None]:
    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        observer(args[0] if args else next(value for value in kwargs.values() if isinstance(value, Tensor)))
        if stop:
            raise _Reached

    return hook
