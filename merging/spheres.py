"""Means along arcs, from inner products alone: interpolation between two models, the Karcher mean of several,
angles of task vectors.

Shape letters: N experts, S the shape of a parameter.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

_TINY = 1e-8  # a tensor of a smaller norm has no direction
_NOISE = 1e-4  # sines below are made of rounding: nothing is divided by them
_PARALLEL = 1 - _NOISE**2 / 2  # the cosine of so small an angle
_CANCELLED = 1e-5  # unit tensors whose mean is shorter cancel: its direction is rounding


def slerp_factors(products_22: Tensor, t: float, linear_above: float = 0.9995) -> Tensor:
    """[sin((1 - t) theta), sin(t theta)] / sin theta, theta the angle between the two; linear if small.

    The tensors themselves are combined, not their unit vectors. Linear, too, whatever `linear_above`, where
    they are parallel or opposite up to rounding: there sin theta is noise.
    """
    norms = products_22.diagonal().sqrt()
    lengths = norms.where(norms > _TINY, 1)
    cosine = products_22[0, 1] / lengths[0] / lengths[1]
    if cosine.abs() >= min(linear_above, _PARALLEL):
        return torch.tensor([1 - t, t], dtype=products_22.dtype)
    theta = torch.arccos(cosine)
    return torch.stack([torch.sin((1 - t) * theta), torch.sin(t * theta)]) / torch.sin(theta)


def karcher_factors(products_NN: Tensor, weights_N: Tensor, *, iterations: int, tolerance: float) -> Tensor:
    """Factors of the point of the unit sphere with the least weighted squared angle to all, times the mean
    norm.

    Tensors without length have no direction and count only in the norm. A tensor that lies opposite
    the mean is in no one direction from there, and does not move it: of tensors on one line, the mean points
    where the greater weight does, or as the first where both are equal. Points are written as sums of the
    unit tensors, in which all products are known.
    """
    norms_N = products_NN.diagonal().clamp(min=0).sqrt()
    shares_N = weights_N / weights_N.sum()
    lasting = (norms_N > _TINY) & (shares_N > 0)
    factors_N = torch.zeros_like(norms_N)
    if not lasting.any():
        return factors_N
    lengths = norms_N[lasting]
    cosines = products_NN[lasting][:, lasting] / lengths[:, None] / lengths
    pull = shares_N[lasting] / shares_N[lasting].sum()
    first = torch.zeros_like(pull)
    first[0] = 1
    length = _length(pull, cosines)
    mean = first if length < max(tolerance, _CANCELLED) else pull / length
    for _ in range(iterations):
        step = _tangent(mean, cosines, pull, tolerance)
        length = _length(step, cosines)
        if length < tolerance:
            break
        mean = torch.cos(length) * mean + torch.sin(length) * step / length
        mean = mean / _length(mean, cosines)
    factors_N[lasting] = (shares_N * norms_N).sum() * mean / lengths
    return factors_N


def mean_cosine(products_NN: Tensor, of: Literal["cosines", "angles"]) -> Tensor:
    """The cosine between task vectors, averaged over pairs; any further axes stay (N N ... to ...)."""
    norms = products_NN.diagonal().movedim(-1, 0).clamp(min=0).sqrt()
    pairs = [(i, j) for i in range(len(norms)) for j in range(i)]
    cosines = []
    for i, j in pairs:
        product = norms[i] * norms[j]
        cosines.append((products_NN[i, j] / product.where(product > 0, 1)).clamp(-1, 1))
    stacked = torch.stack(cosines)
    return stacked.mean(dim=0) if of == "cosines" else stacked.arccos().mean(dim=0).cos()


def row_products(deltas_NS: Tensor) -> Tensor:
    """Inner products (N N and all axes but the last) of the rows along the last axis."""
    return torch.einsum("n...d,m...d->nm...", deltas_NS, deltas_NS)


def _length(factors: Tensor, cosines: Tensor) -> Tensor:
    return (factors @ cosines @ factors).clamp(min=0).sqrt()


def _tangent(mean: Tensor, cosines: Tensor, pull: Tensor, tolerance: float) -> Tensor:
    """The weighted mean of the directions in which the units lie, as long as their angles."""
    step = torch.zeros_like(mean)
    for place, cosine in enumerate((cosines @ mean).clamp(-1, 1)):
        theta = torch.arccos(cosine)
        if theta < tolerance or cosine < -_PARALLEL:  # from the opposite point, all directions are as good
            continue
        direction = -cosine * mean
        direction[place] += 1
        step += pull[place] * theta / torch.sin(theta) * direction
    return step
