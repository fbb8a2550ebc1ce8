"""Measuring: what a walk through a block takes into the moments of its feeds and norms.

Shape letters: B examples, T tokens, D features.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from merging.backbones.routed_experts import routed
from merging.contracts.backbone import Backbone, Batch
from merging.errors import NumericalError, TracingError
from merging.moments import Moments, NormMoments
from merging.tracer import Block, Feed


class TokenWeights:
    """Token weights of one batch, by linear or norm."""

    def __init__(self, backbone: Backbone, batch: Batch, block: Block, reads_out: bool) -> None:
        """`block`: of the model that runs; routed experts' tokens are those of its latest run."""
        self._backbone, self._batch, self._block = backbone, batch, block
        self._last = block.last and reads_out

    def __call__(self, name: str, tokens: tuple[int, ...]) -> Tensor | None:
        experts = routed(self._block.module, name)
        if experts is None:
            return self._of_all(name, tokens)
        routes = experts.owner.routes
        weights_N = self._of_all(name, (routes.total,))
        return None if weights_N is None else weights_N[routes.tokens[experts.number].to(weights_N.device)]

    def _of_all(self, name: str, tokens: tuple[int, ...]) -> Tensor | None:
        weights_BT = self._backbone.token_weights(self._batch, self._block.stack, name, tokens, self._last)
        if weights_BT is not None and tuple(weights_BT.shape) != tuple(tokens):
            raise TracingError(
                f'"{self._block.name}.{name}" sees tokens of shape {tuple(tokens)}, the backbone weighs '
                f"tokens of shape {tuple(weights_BT.shape)}"
            )
        return weights_BT


class Measure:
    """Observers that take a batch into the moments of a block."""

    def __init__(
        self,
        block: Block,
        moments: dict[Feed, Moments],
        norms: dict[str, NormMoments],
        kinds: Mapping[str, NormKind],
        weights: TokenWeights,
        untouched: Container[str] = (),
    ) -> None:
        """`untouched`: linears whose input the block leaves as it was; those need not be copied."""
        self._block, self._moments, self._norms = block, moments, norms
        self._kinds, self._weights, self._untouched = kinds, weights, untouched
        self._kept: dict[Feed, _Kept] = {}
        self._targets: dict[Feed, _Kept] = {}
        self._answered: dict[Feed, dict[str, Tensor]] = {}

    def observers(self) -> dict[str, Callable[[Tensor], None]]:
        """One walk gives all: the inputs of feeds and norms."""
        return {**self._each_feed(self._add), **self._norm_observers()}

    def keepers(self) -> dict[str, Callable[[Tensor], None]]:
        """The student's walk, when the expert's is to follow: norms are taken in, feeds are kept for
        pairing."""
        return {**self._each_feed(self._keep), **self._norm_observers()}

    def pairers(self) -> dict[str, Callable[[Tensor], None]]:
        """The expert's walk over the same batch."""
        return self._each_feed(self._pair)

    def answers(self, expert: nn.Module) -> dict[str, Callable[[Tensor], None]]:
        """With `pairers`: what the linears of the expert's block make of their inputs, where moments are made
        of that."""
        return {
            linear: partial(self._answer, feed, linear, getattr(expert.get_submodule(linear), "bias", None))
            for feed, moments in self._moments.items()
            if moments.answers
            for linear in feed.linears
        }

    def _each_feed(self, action: Callable[[Feed, Tensor], None]) -> dict[str, Callable[[Tensor], None]]:
        return {feed.linears[0]: partial(action, feed) for feed in self._moments}

    def _norm_observers(self) -> dict[str, Callable[[Tensor], None]]:
        return {name: partial(self._add_norm, name) for name in self._norms}

    def _add(self, feed: Feed, x_BTD: Tensor) -> None:
        with _told(self._block, feed.linears[0]):
            self._moments[feed].add(x_BTD, self._weights(feed.linears[0], x_BTD.shape[:-1]))

    def _keep(self, feed: Feed, x_BTD: Tensor) -> None:
        if feed in self._kept:
            raise self._ran_again(feed)
        self._kept[feed] = self._for_later(feed, x_BTD)

    def _pair(self, feed: Feed, target_BTD: Tensor) -> None:
        if self._moments[feed].answers:
            self._targets[feed] = self._for_later(feed, target_BTD)
        else:
            self._add_pair(feed, target_BTD)

    def _answer(self, feed: Feed, linear: str, bias_O: Tensor | None, answer_BTO: Tensor) -> None:
        answered = self._answered.setdefault(feed, {})
        answered[linear] = answer_BTO.clone() if bias_O is None else answer_BTO - bias_O
        if len(answered) == len(feed.linears):
            answers_BTO = torch.cat([answered[name] for name in feed.linears], dim=-1)
            del self._answered[feed]
            self._add_pair(feed, self._taken(feed, self._targets), answers_BTO)

    def _add_pair(self, feed: Feed, target_BTD: Tensor, answers_BTO: Tensor | None = None) -> None:
        x_BTD = self._taken(feed, self._kept)
        weights_BT = self._weights(feed.linears[0], x_BTD.shape[:-1])
        with _told(self._block, feed.linears[0]):
            self._moments[feed].add(x_BTD, weights_BT, target_BTD, answers_BTO)

    def _for_later(self, feed: Feed, x_BTD: Tensor) -> _Kept:
        copied = feed.linears[0] not in self._untouched  # the block goes on to change it in place
        kept_BTD = x_BTD.clone() if copied else x_BTD
        return _Kept(kept_BTD, kept_BTD._version)

    def _taken(self, feed: Feed, kept: dict[Feed, _Kept]) -> Tensor:
        if feed not in kept:
            raise self._ran_again(feed)
        x_BTD, version = kept.pop(feed)
        if x_BTD._version != version:
            raise TracingError(
                f'"{self._block.name}" changes the input of "{feed.linears[0]}" in place for some batches',
                remedy="Its inputs cannot be measured. Take the block out of the backbone's stacks.",
            )
        return x_BTD

    def _ran_again(self, feed: Feed) -> TracingError:
        return TracingError(
            f'"{self._block.name}" runs "{feed.linears[0]}" once for some batches, more than once for others',
            remedy="Its inputs cannot be measured. Take the block out of the backbone's stacks.",
        )

    def _add_norm(self, name: str, x_BTD: Tensor) -> None:
        z_BTD = normalised(self._block.module.get_submodule(name), x_BTD, self._kinds[name].offset)
        self._norms[name].add(z_BTD, self._weights(name, x_BTD.shape[:-1]))


class _Kept(NamedTuple):
    tensor: Tensor
    version: int  # goes up with every change in place


@contextmanager
def _told(block: Block, linear: str) -> Iterator[None]:
    """Name the module whose inputs are not finite."""
    try:
        yield
    except NumericalError as error:
        raise NumericalError(f'an activation, the input of "{block.name}.{linear}", is not finite') from error


class NormKind(NamedTuple):
    """How a norm uses its parameters: output = z · (weight + offset) + bias."""

    features: int
    shift: bool
    offset: float


def norm_kind(norm: nn.Module) -> NormKind:
    """Found by trying: with a weight of 0, a norm of offset 1 (Gemma) still lets its input through."""
    weight = norm.get_parameter("weight")
    probe = torch.linspace(-1.0, 1.0, weight.shape[0], dtype=weight.dtype, device=weight.device)
    offset = 0.0 if not bool(normalised(norm, probe[None, None], 1.0).any()) else 1.0
    return NormKind(int(weight.shape[0]), getattr(norm, "bias", None) is not None, offset)


def normalised(norm: nn.Module, x: Tensor, offset: float) -> Tensor:
    """What a norm makes of x before scale and shift, whatever its kind: its forward, with neutral
    parameters."""
    own = dict(norm._parameters)
    neutral = {name: torch.zeros_like(value) for name, value in own.items() if value is not None}
    neutral["weight"] += 1.0 - offset
    try:
        norm._parameters.update(
            {name: nn.Parameter(value, requires_grad=False) for name, value in neutral.items()}
        )
        z: Tensor = norm.forward(x)  # not called as a module: its hooks are ours
    finally:
        norm._parameters.update(own)
    return z


def split_by_weights(feed: Feed, weights: TokenWeights) -> list[Feed]:
    """A feed in parts whose linears weigh its tokens alike: each part has a Gram of its own."""
    parts: list[tuple[Tensor | None, list[str]]] = []
    for linear in feed.linears:
        mine = weights(linear, feed.tokens)
        for theirs, linears in parts:
            if (mine is None and theirs is None) or (
                mine is not None and theirs is not None and torch.equal(mine, theirs)
            ):
                linears.append(linear)
                break
        else:
            parts.append((mine, [linear]))
    return [feed._replace(linears=tuple(linears)) for _, linears in parts]
