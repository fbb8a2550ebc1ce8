"""Moments: sums over the tokens of one feed, accumulated batch by batch.

Shape letters: B examples, T tokens, D features.
"""

from __future__ import annotations

import torch
from torch import Tensor

from merging.errors import NumericalError


class Moments:
    """E[x xᵀ], E[x_target xᵀ] and the means of one feed under one task, weighted per token.

    Sums are kept in float32 (float64 for float64 inputs); what one reads is divided by the total token
    weight, so that neither the number of tokens nor the batch size matters. Padding has weight 0 and is left
    out."""

    def __init__(self, features: int, *, target: bool = False, unit_tokens: bool = False) -> None:
        """`target`: also the cross moment with target inputs. `unit_tokens`: scale each token to length 1
        first."""
        self.features, self._target, self._unit = features, target, unit_tokens
        self.total = 0.0  # sum of token weights
        self.tokens = 0  # tokens of non-zero weight
        self._gram: Tensor | None = None
        self._cross: Tensor | None = None
        self._sum = torch.zeros(features)
        self._target_sum = torch.zeros(features)

    @classmethod
    def of(
        cls, gram_DD: Tensor, cross_DD: Tensor, mean_D: Tensor, target_mean_D: Tensor, *, tokens: int
    ) -> Moments:
        """Moments known from elsewhere, already divided by the number of tokens."""
        moments = cls(len(mean_D), target=True)
        moments.tokens, moments.total = tokens, float(tokens)
        moments._gram, moments._cross = gram_DD * tokens, cross_DD * tokens
        moments._sum, moments._target_sum = mean_D * tokens, target_mean_D * tokens
        return moments

    def add(self, x_BTD: Tensor, weights_BT: Tensor | None = None, target_BTD: Tensor | None = None) -> None:
        """Take in one batch; any leading axes. Raises NumericalError when an input is not finite."""
        if self._target != (target_BTD is not None):
            raise ValueError(
                "target inputs must be given exactly when the moments were made with target=True"
            )
        x_TD = self._rows(x_BTD, weights_BT)
        w_T = _chosen(weights_BT, x_TD)
        weighted_TD = x_TD if w_T is None else x_TD * w_T[:, None]
        if self._gram is None:
            self._gram = torch.zeros(self.features, self.features, dtype=x_TD.dtype, device=x_TD.device)
            self._sum = self._sum.to(x_TD)
        self._gram.addmm_(x_TD.T, weighted_TD)
        self._sum += weighted_TD.sum(0)
        if target_BTD is not None:
            y_TD = self._rows(target_BTD, weights_BT)
            if self._cross is None:
                self._cross = torch.zeros_like(self._gram)
                self._target_sum = self._target_sum.to(y_TD)
            self._cross.addmm_(y_TD.T, weighted_TD)
            self._target_sum += y_TD.sum(0) if w_T is None else (y_TD * w_T[:, None]).sum(0)
        self.tokens += x_TD.shape[0]
        self.total += float(x_TD.shape[0] if w_T is None else w_T.sum())
        if not bool(torch.isfinite(self._sum).all() and torch.isfinite(self._target_sum).all()):
            raise NumericalError("an activation is not finite")

    @property
    def gram_DD(self) -> Tensor:
        """E[x xᵀ]; zeros where no token was seen."""
        if self._gram is None:
            return torch.zeros(self.features, self.features)
        return self._gram / max(self.total, _TINY)

    @property
    def cross_DD(self) -> Tensor:
        """E[x_target xᵀ]: rows are target features."""
        if self._cross is None:
            return torch.zeros(self.features, self.features)
        return self._cross / max(self.total, _TINY)

    @property
    def mean_D(self) -> Tensor:
        return self._sum / max(self.total, _TINY)

    @property
    def target_mean_D(self) -> Tensor:
        return self._target_sum / max(self.total, _TINY)

    def _rows(self, x_BTD: Tensor, weights_BT: Tensor | None) -> Tensor:
        x_TD = x_BTD.reshape(-1, self.features)
        if x_TD.dtype not in (torch.float32, torch.float64):
            x_TD = x_TD.float()
        if weights_BT is not None and bool((weights_BT == 0).any()):
            x_TD = x_TD[weights_BT.reshape(-1) != 0]
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

    @property
    def mean_D(self) -> Tensor:
        return self._sum / max(self.total, _TINY)

    @property
    def square_D(self) -> Tensor:
        return self._square / max(self.total, _TINY)


_TINY = 1e-12


def _chosen(weights_BT: Tensor | None, x_TD: Tensor) -> Tensor | None:
    """Weights of the rows that were kept; None when all of them are 1."""
    if weights_BT is None:
        return None
    w_T = weights_BT.reshape(-1).to(x_TD)
    w_T = w_T[w_T != 0]
    if w_T.shape[0] != x_TD.shape[0]:
        raise ValueError(f"{w_T.shape[0]} token weights for {x_TD.shape[0]} tokens")
    return None if bool((w_T == 1).all()) else w_T
