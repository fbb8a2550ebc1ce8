"""Moments: sums over the tokens of one feed, accumulated batch by batch.

Shape letters: B examples, T tokens, D features.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from merging.errors import NumericalError
from merging.ranks import Ranks


class Pool:
    """Memory for sums of one shape after another: fresh memory costs more than what is computed in it."""

    def __init__(self) -> None:
        self._free: list[Tensor] = []

    def take(self, shape: tuple[int, ...], *, dtype: torch.dtype, device: torch.device | str) -> Tensor:
        """A tensor of any values."""
        for place, tensor in enumerate(self._free):
            if tuple(tensor.shape) == shape and tensor.dtype == dtype and tensor.device == device:
                return self._free.pop(place)
        return torch.empty(shape, dtype=dtype, device=device)

    def take_back(self, tensor: Tensor) -> None:
        self._free.append(tensor)

    def clear(self) -> None:
        self._free.clear()


class Moments:
    """E[x xᵀ], how targets meet x, and the means of one feed under one task, weighted per token.

    Sums are kept in float32 (float64 for float64 inputs; bfloat16 inputs are multiplied as such, a batch at
    a time); what one reads is divided by the total token weight, so that neither the number of tokens nor the
    batch size matters. Padding has weight 0 and is left out. Of E[x xᵀ] only one half is computed."""

    def __init__(
        self,
        features: int,
        *,
        target: bool = False,
        answers: int = 0,
        unit_tokens: bool = False,
        pool: Pool | None = None,
    ) -> None:
        """`target`: also the cross moment with target inputs; with `answers`, with the so many outputs that a
        linear makes of them instead. `unit_tokens`: scale each token to length 1 first. `pool`: where the
        sums' memory is from, and goes back to by `release`."""
        self.features, self._target, self._unit = features, target, unit_tokens
        self.total = 0.0  # sum of token weights
        self.tokens = 0  # tokens of non-zero weight
        self._half: Tensor | None = None  # the Gram's upper blocks; what is below them, `_settled` says
        self._cross: Tensor | None = None
        self._answers, self._pool = answers, pool or Pool()
        self._sum = torch.zeros(features)
        self._target_sum = torch.zeros(features)
        self._released = False
        self._settled = False  # whether `_half` is the whole Gram, divided
        self._norm = 0.0  # of that

    @classmethod
    def of(
        cls, gram_DD: Tensor, cross_DD: Tensor, mean_D: Tensor, target_mean_D: Tensor, *, tokens: int
    ) -> Moments:
        """Moments known from elsewhere, already divided by the number of tokens."""
        moments = cls(len(mean_D), target=True)
        moments.tokens, moments.total = tokens, float(tokens)
        moments._half, moments._cross = gram_DD * tokens, cross_DD * tokens
        moments._sum, moments._target_sum = mean_D * tokens, target_mean_D * tokens
        return moments

    def add(
        self,
        x_BTD: Tensor,
        weights_BT: Tensor | None = None,
        target_BTD: Tensor | None = None,
        answers_BTO: Tensor | None = None,
    ) -> None:
        """Take in one batch; any leading axes. Raises NumericalError when an input is not finite."""
        if self._target != (target_BTD is not None) or bool(self._answers) != (answers_BTO is not None):
            raise ValueError("targets and answers must be given exactly when the moments were made for them")
        x_TD = self._rows(x_BTD, weights_BT)
        w_T = _chosen(weights_BT, x_TD)
        weighted_TD = x_TD if w_T is None else x_TD * w_T[:, None]
        first = self._half is None
        if self._half is None:
            like: dict[str, Any] = {"dtype": sums_dtype(x_TD.dtype), "device": x_TD.device}
            self._half = self._pool.take((self.features, self.features), **like)
            self._sum, self._target_sum = self._sum.to(**like), self._target_sum.to(**like)
        self._open()
        _add_half_gram(self._half, x_TD, weighted_TD, first=first)
        self._sum += weighted_TD.sum(0, dtype=self._sum.dtype)
        if target_BTD is not None:
            y_TD = self._rows(target_BTD, weights_BT)
            weighted_y = y_TD if w_T is None else y_TD * w_T[:, None]
            self._target_sum += weighted_y.sum(0, dtype=self._sum.dtype)
            met = y_TD if answers_BTO is None else _wide_rows(answers_BTO, weights_BT)
            first = self._cross is None
            if self._cross is None:
                self._cross = self._pool.take((met.shape[1], self.features), **_like(self._half))
            _add_product(self._cross, met, weighted_TD, first=first)
        self.tokens += x_TD.shape[0]
        self.total += float(x_TD.shape[0] if w_T is None else w_T.sum())
        if not bool(torch.isfinite(self._sum).all() and torch.isfinite(self._target_sum).all()):
            raise NumericalError("an activation is not finite")

    def release(self) -> None:
        """Give the memory of the sums back; nothing can be asked any more."""
        for sums in (self._half, self._cross):
            if sums is not None:
                self._pool.take_back(sums)
        self._half = self._cross = None
        self._released = True

    def _check(self) -> None:
        if self._released:
            raise ValueError("these moments are gone: keep a copy, or ask while the task is folded in")

    @property
    def answers(self) -> int:
        """Outputs of the linear whose answers are the targets; 0: its inputs are."""
        return self._answers

    @property
    def gram_DD(self) -> Tensor:
        """E[x xᵀ]; zeros where no token was seen. Valid until more is added."""
        self._check()
        if self._half is None:
            return torch.zeros(self.features, self.features)
        if not self._settled:
            self._norm = _settle_(self._half, max(self.total, _TINY))
            self._settled = True
        return self._half

    @property
    def gram_norm(self) -> float:
        """Frobenius norm of E[x xᵀ]."""
        return 0.0 if self.gram_DD is not self._half else self._norm

    def _open(self) -> None:
        """Sums again, where the Gram had been asked for."""
        if self._settled and self._half is not None:
            self._half.mul_(max(self.total, _TINY))
        self._settled = False

    @property
    def cross_DD(self) -> Tensor:
        """E[x_target xᵀ]: rows are target features."""
        if self._answers:
            raise ValueError("these moments were made for answers")
        return self._met() / max(self.total, _TINY)

    def met(self, weight_OD: Tensor, *, share: float = 1.0) -> Tensor:
        """E[W x_mixed xᵀ] (O D) for x_mixed = share · x_target + (1 - share) · x, W the linear's weight.

        By the answers where they were measured, else by the cross moment."""
        if not self._answers:
            mixed_DD = self.cross_DD * share + self.gram_DD * (1 - share)
            return weight_OD @ mixed_DD.to(weight_OD)
        each, met_OD = share / max(self.total, _TINY), self._met().to(weight_OD)
        if share == 1:
            return met_OD * each
        return torch.addmm(met_OD, weight_OD, self.gram_DD.to(weight_OD), beta=each, alpha=1 - share)

    @property
    def mean_D(self) -> Tensor:
        return self._sum / max(self.total, _TINY)

    @property
    def target_mean_D(self) -> Tensor:
        return self._target_sum / max(self.total, _TINY)

    def share_(self, ranks: Ranks, to: int, dtype: torch.dtype) -> None:
        """Make sums over what all processes took in. Gram and targets are for process `to` alone.

        `dtype`: of the sums, for a process that took in nothing."""
        if ranks.size == 1:
            return
        self._open()
        if self._half is None:
            wide = sums_dtype(dtype)
            self._half = torch.zeros(self.features, self.features, dtype=wide)
            self._sum, self._target_sum = self._sum.to(wide), self._target_sum.to(wide)
        ranks.total_(self._half, to)
        if self._target:
            if self._cross is None:
                self._cross = self._half.new_zeros(self._answers or self.features, self.features)
            ranks.total_(self._cross, to)
        counts = torch.tensor([self.total, float(self.tokens)], dtype=torch.float64)
        for sums in (counts, self._sum, self._target_sum):
            ranks.total_(sums)
        self.total, self.tokens = float(counts[0]), int(counts[1])

    def _met(self) -> Tensor:
        self._check()
        if self._cross is None:
            return torch.zeros(self._answers or self.features, self.features)
        return self._cross

    def _rows(self, x_BTD: Tensor, weights_BT: Tensor | None) -> Tensor:
        x_TD = _wide_rows(x_BTD, weights_BT)
        if self._unit:
            x_TD = x_TD / x_TD.norm(dim=1, keepdim=True).clamp_min(_TINY)
        return x_TD


class NormMoments:
    """Per channel E[z] and E[z²] of normalised inputs z (before scale and shift) under one task."""

    def __init__(self, features: int) -> None:
        self.features = features
        self.total = 0.0
        self._sum = torch.zeros(features)
        self._square = torch.zeros(features)

    def add(self, z_BTD: Tensor, weights_BT: Tensor | None = None) -> None:
        z_TD = z_BTD.reshape(-1, self.features)
        z_TD = z_TD if z_TD.dtype == torch.float64 else z_TD.float()
        self._sum, self._square = self._sum.to(z_TD), self._square.to(z_TD)
        if weights_BT is None:
            self._sum += z_TD.sum(0)
            self._square += z_TD.square().sum(0)
            self.total += z_TD.shape[0]
        else:
            w_T = weights_BT.reshape(-1).to(z_TD)
            z_TD = z_TD.masked_fill(w_T[:, None] == 0, 0.0)
            self._sum += w_T @ z_TD
            self._square += w_T @ z_TD.square()
            self.total += float(w_T.sum())

    def share_(self, ranks: Ranks, dtype: torch.dtype) -> None:
        """Make sums over what all processes took in."""
        if ranks.size > 1:
            if not self.total:
                self._sum, self._square = self._sum.to(sums_dtype(dtype)), self._square.to(sums_dtype(dtype))
            total = torch.tensor(self.total, dtype=torch.float64)
            for sums in (total, self._sum, self._square):
                ranks.total_(sums)
            self.total = float(total)

    @property
    def mean_D(self) -> Tensor:
        return self._sum / max(self.total, _TINY)

    @property
    def square_D(self) -> Tensor:
        return self._square / max(self.total, _TINY)


_TINY = 1e-12


def _like(tensor: Tensor) -> dict[str, Any]:
    return {"dtype": tensor.dtype, "device": tensor.device}


def _wide_rows(x_BTD: Tensor, weights_BT: Tensor | None) -> Tensor:
    """One row a token, without padding, in a dtype whose products do not overflow."""
    x_TD = x_BTD.reshape(-1, x_BTD.shape[-1])
    if x_TD.dtype not in (torch.bfloat16, torch.float32, torch.float64):
        x_TD = x_TD.float()
    if weights_BT is not None and bool((weights_BT == 0).any()):
        x_TD = x_TD[weights_BT.reshape(-1) != 0]
    return x_TD


def _chosen(weights_BT: Tensor | None, x_TD: Tensor) -> Tensor | None:
    """Weights of the rows that were kept; None when all of them are 1."""
    if weights_BT is None:
        return None
    w_T = weights_BT.reshape(-1).to(x_TD)
    w_T = w_T[w_T != 0]
    if w_T.shape[0] != x_TD.shape[0]:
        raise ValueError(f"{w_T.shape[0]} token weights for {x_TD.shape[0]} tokens")
    return None if bool((w_T == 1).all()) else w_T


_ROWS = {1024: 4, 2048: 6}  # blocks of rows in which a Gram is added up, from that many features on
_MOST_ROWS = 8


def row_blocks(features: int) -> list[tuple[int, int]]:
    """First row and the one after the last of each block of a Gram: one block for few features. Of a block,
    what lies before its own columns is another's transposed."""
    count = 1 if features < 512 else next((n for below, n in _ROWS.items() if features < below), _MOST_ROWS)
    edges = [features * i // count for i in range(count + 1)]
    return list(pairwise(edges))


def _add_half_gram(half_DD: Tensor, x_TD: Tensor, weighted_TD: Tensor, *, first: bool) -> None:
    """The upper blocks of xᵀ w x: half the work of the whole, but for the diagonal blocks."""
    for start, stop in row_blocks(len(half_DD)):
        _add_product(half_DD[start:stop, start:], x_TD[:, start:stop], weighted_TD[:, start:], first=first)


def _add_product(sums_AB: Tensor, a_TA: Tensor, b_TB: Tensor, *, first: bool) -> None:
    """sums += aᵀ b; the `first` product replaces what is there. In bfloat16 the product of one batch is
    rounded to it before it is added up."""
    if a_TA.dtype == sums_AB.dtype:
        sums_AB.addmm_(a_TA.T, b_TB, beta=0 if first else 1)
    elif first:
        sums_AB.copy_(a_TA.T @ b_TB)
    else:
        sums_AB += (a_TA.T @ b_TB).to(sums_AB.dtype)


def sums_dtype(dtype: torch.dtype) -> torch.dtype:
    """What activations of that dtype are summed and solved in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _settle_(half_DD: Tensor, divisor: float) -> float:
    """The whole Gram over `divisor`, in place, and its Frobenius norm; each part is fetched from memory
    once."""
    squares = half_DD.new_zeros((), dtype=torch.float64)
    for start, stop in row_blocks(len(half_DD)):
        own, right = half_DD[start:stop, start:].div_(divisor).tensor_split([stop - start], dim=1)
        half_DD[stop:, start:stop] = right.T
        squares += torch.linalg.vector_norm(own).double().square()
        squares += 2 * torch.linalg.vector_norm(right).double().square()
    return float(squares.sqrt())


def mirror_(half_DD: Tensor) -> Tensor:
    """The whole Gram, in place; each diagonal block is there in full."""
    for start, stop in row_blocks(len(half_DD)):
        half_DD[stop:, start:stop] = half_DD[start:stop, stop:].T
    return half_DD
