"""Means along arcs: interpolation between two tensors, the Karcher mean of several, angles of task vectors.

Shape letters: N experts, S the shape of a parameter.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from merging.task_vectors import weighted_sum

_TINY = 1e-8  # a tensor of a smaller norm has no direction


def slerp(a_S: Tensor, b_S: Tensor, t: float, linear_above: float = 0.9995) -> Tensor:
    """[sin((1 - t) theta) a + sin(t theta) b] / sin theta, theta the angle between them; linear if small.

    The tensors themselves are combined, not their unit vectors.
    """
    cosine = (_unit(a_S) * _unit(b_S)).sum()
    if cosine.abs() > linear_above:
        return a_S * (1 - t) + b_S * t
    theta = torch.arccos(cosine)
    return (torch.sin((1 - t) * theta) * a_S + torch.sin(t * theta) * b_S) / torch.sin(theta)


def karcher_mean(tensors_NS: Tensor, weights_N: Tensor, *, iterations: int, tolerance: float) -> Tensor:
    """The point of the unit sphere with the least weighted squared angle to all, times the mean norm.

    Tensors without length have no direction and count only in the norm.
    """
    norms_N = torch.stack([tensor_S.norm() for tensor_S in tensors_NS])
    shares_N = weights_N / weights_N.sum()
    lasting = norms_N > tolerance
    if not lasting.any():
        return torch.zeros_like(tensors_NS[0])
    units_NS = torch.stack([_unit(tensor_S) for tensor_S in tensors_NS[lasting]])
    pull_N = shares_N[lasting] / shares_N[lasting].sum()
    start_S = weighted_sum(units_NS, pull_N)
    mean_S = units_NS[0] if start_S.norm() < tolerance else start_S / start_S.norm()
    for _ in range(iterations):
        step_S = _tangent(mean_S, units_NS, pull_N, tolerance)
        length = step_S.norm()
        if length < tolerance:
            break
        mean_S = _unit(torch.cos(length) * mean_S + torch.sin(length) * step_S / length)
    return (shares_N * norms_N).sum() * mean_S


def mean_cosine(deltas_NS: Tensor, *, rows: bool, of: Literal["cosines", "angles"]) -> Tensor:
    """The cosine between task vectors, averaged over pairs; one, or one per row along the last axis."""
    flat = deltas_NS if rows and deltas_NS.ndim > 1 else deltas_NS.reshape(len(deltas_NS), 1, -1)
    norms = flat.norm(dim=-1)
    cosines = []
    for i in range(len(flat)):
        for j in range(i):
            product = norms[i] * norms[j]
            cosine = (flat[i] * flat[j]).sum(dim=-1) / product.where(product > 0, 1)
            cosines.append(cosine.clamp(-1, 1))
    stacked = torch.stack(cosines)
    mean = stacked.mean(dim=0) if of == "cosines" else stacked.arccos().mean(dim=0).cos()
    return mean[..., None] if rows and deltas_NS.ndim > 1 else mean[0]


def _unit(tensor_S: Tensor) -> Tensor:
    norm = tensor_S.norm()
    return tensor_S / norm if norm > _TINY else tensor_S


def _tangent(mean_S: Tensor, units_NS: Tensor, pull_N: Tensor, tolerance: float) -> Tensor:
    """The weighted mean of the directions in which the units lie, as long as their angles."""
    steps = []
    for unit_S in units_NS:
        cosine = (mean_S * unit_S).sum().clamp(-1, 1)
        theta = torch.arccos(cosine)
        sine = torch.sin(theta)
        near = theta < tolerance or sine == 0
        steps.append(torch.zeros_like(mean_S) if near else theta / sine * (unit_S - cosine * mean_S))
    return weighted_sum(torch.stack(steps), pull_N)
