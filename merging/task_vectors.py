"""Arithmetic on task vectors: trim, elect signs, merge what agrees; in pure functions of tensors.

Sums over experts are added up in the order given, so that row blocks give the same bits as whole tensors.

Shape letters: N experts, S the shape of a parameter (or of a block of its rows).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from torch import Tensor

from merging import native
from merging.thresholds import Vectors, magnitude_bits

if TYPE_CHECKING:
    from merging.contracts.vectors import TaskVectors


def weighted_sum(tensors_NS: Tensor, weights_N: Tensor | None = None, divisor: float = 1) -> Tensor:
    """sum_i w_i x_i, added up in order. torch's own sum orders the additions by the size of the block."""
    weights = [1.0] * len(tensors_NS) if weights_N is None else weights_N.tolist()
    if native.stacked(tensors_NS):
        return native.weighted_sum(tensors_NS, weights, divisor)
    total_S = tensors_NS[0] * weights[0]
    scaled_S = torch.empty_like(total_S)
    for weight, tensor_S in zip(weights[1:], tensors_NS[1:], strict=True):
        total_S += tensor_S if weight == 1 else torch.mul(tensor_S, weight, out=scaled_S)
    return total_S if divisor == 1 else total_S.div_(divisor)


def trim(deltas_NS: Tensor, threshold_N: Tensor) -> Tensor:
    """Entries whose magnitude reaches their expert's threshold; zero elsewhere."""
    return masked(deltas_NS, magnitude_bits(deltas_NS).numpy() >= spread(threshold_N, deltas_NS).numpy())


def masked(tensor: Tensor, mask: np.ndarray) -> Tensor:
    """Zero where the mask is false. NumPy compares and masks in a fifth of torch's time."""
    result = torch.empty_like(tensor)
    np.multiply(tensor.numpy(), mask, out=result.numpy())
    return result


def largest(magnitudes_S: Tensor, count: int) -> Tensor:
    """Mask of exactly `count` entries, none smaller than any left out; of equal ones the first are taken.

    `magnitudes_S`: anything that sorts as the magnitudes do, such as `magnitude_bits`.
    """
    flat = magnitudes_S.flatten()
    if count >= len(flat):
        return torch.ones_like(magnitudes_S, dtype=torch.bool)
    if count <= 0:
        return torch.zeros_like(magnitudes_S, dtype=torch.bool)
    threshold = flat.kthvalue(len(flat) - count + 1).values
    mask = flat > threshold
    equal = (flat == threshold).nonzero().flatten()
    mask[equal[: count - int(mask.sum())]] = True
    return mask.view(magnitudes_S.shape)


def trim_each(deltas_NS: Tensor, density: float) -> Tensor:
    """The int(density * numel) largest entries of each expert (one, where that is none); zero elsewhere."""
    count = max(1, int(density * deltas_NS[0].numel()))
    return torch.stack([delta_S.where(largest(magnitude_bits(delta_S), count), 0) for delta_S in deltas_NS])


def weighed_(tensors_NS: Tensor, weights_N: Tensor) -> Tensor:
    """Each expert's part times its weight, in place."""
    return tensors_NS if bool((weights_N == 1).all()) else tensors_NS.mul_(spread(weights_N, tensors_NS))


def elect_by_mass(deltas_NS: Tensor) -> Tensor:
    """The sign of the sum: -1, 0 or 1."""
    return weighted_sum(deltas_NS).sign()


def elect_by_largest_share(deltas_NS: Tensor, norms_N: Tensor) -> Tensor:
    """The sign of the expert for which the entry is the largest part of its squared norm, first of equals."""
    norms_NS = spread(norms_N.clamp(min=torch.finfo(norms_N.dtype).tiny), deltas_NS)
    winner_S = (deltas_NS / norms_NS).square().argmax(dim=0, keepdim=True)
    return deltas_NS.gather(0, winner_S)[0].sign()


def norms(vectors: Vectors) -> Tensor:
    """The Euclidean norm of each expert's whole task vector."""
    parts: dict[str, list[Tensor]] = {}

    def add(name: str, deltas_NS: Tensor) -> None:
        squares_N = torch.stack([delta_S.square().sum() for delta_S in deltas_NS])
        parts.setdefault(name, []).append(squares_N)

    vectors.visit(add)
    found = vectors.gathered(parts)
    squares = [square_N for name in sorted(found) for square_N in found[name]]
    return weighted_sum(torch.stack(squares)).sqrt() if squares else torch.zeros(0)


def spread(values_N: Tensor, tensors_NS: Tensor) -> Tensor:
    """One value per expert, in a shape that multiplies `tensors_NS`."""
    return values_N.view(-1, *[1] * (tensors_NS.ndim - 1))


def agreeing(deltas_NS: Tensor, sign_S: Tensor) -> Tensor:
    """Entries of the elected sign (-1 or 1; 0 elects none); zero elsewhere."""
    return (deltas_NS * sign_S).clamp_(min=0) * sign_S


def disjoint_merge(
    deltas_NS: Tensor, sign_S: Tensor, weights_N: Tensor, how: Literal["mean", "sum", "max"]
) -> Tensor:
    """One value of the entries that agree with the elected sign: their mean, their sum, or the largest.

    `deltas_NS` are already times their weights; the mean divides by the weights of those that agree.
    """
    along_NS = (deltas_NS * sign_S).clamp_(min=0)
    if how == "max":
        return along_NS.amax(dim=0) * sign_S
    total_S = weighted_sum(along_NS).mul_(sign_S)
    if how == "sum":
        return total_S
    divisor_S = weighted_sum(along_NS.sign_(), weights_N)
    lightest = weights_N.min()
    if lightest > 0:  # the divisor is 0, or at least this
        return total_S.div_(divisor_S.clamp_(min=lightest))
    return total_S / divisor_S.where(divisor_S.abs() >= 1e-8, 1)


def onto(base_S: Tensor, merged_S: Tensor, scale: float) -> Tensor:
    """base + scale * merged, in the memory of `merged_S`."""
    if scale != 1:
        merged_S.mul_(scale)
    return merged_S.add_(base_S)


def elect_and_merge(
    deltas_NS: Tensor,
    thresholds_N: Tensor,
    weights_N: Tensor,
    how: Literal["mean", "sum", "max"],
    majority: Callable[[], int],
) -> Tensor:
    """TIES: trimmed by threshold, weighed, elected by mass, merged. `majority`: the sign of entries where the
    experts cancel; asked for only if there are any."""
    if how != "max" and native.stacked(deltas_NS) and bool((weights_N > 0).all()):
        mean = how == "mean"
        merged_S, count = native.ties(deltas_NS, thresholds_N, weights_N, mean=mean, sign_of_zero=1)
        if count and majority() != 1:
            merged_S, _ = native.ties(deltas_NS, thresholds_N, weights_N, mean=mean, sign_of_zero=-1)
        return merged_S
    trimmed_NS = weighed_(trim(deltas_NS, thresholds_N), weights_N)
    return merge_agreeing(trimmed_NS, elect_by_mass(trimmed_NS), weights_N, how, majority)


def balance(deltas_NS: Tensor, thresholds_N: Tensor, weights_N: Tensor) -> int:
    """How many more entries elect + than -, trimmed and weighed as in `elect_and_merge`."""
    if native.stacked(deltas_NS):
        return native.balance(deltas_NS, thresholds_N, weights_N)
    return int(elect_by_mass(weighed_(trim(deltas_NS, thresholds_N), weights_N)).sum())


def merge_agreeing(
    trimmed_NS: Tensor,
    sign_S: Tensor,
    weights_N: Tensor,
    how: Literal["mean", "sum", "max"],
    majority: Callable[[], int],
) -> Tensor:
    """`disjoint_merge`, with the majority's sign where the experts cancel."""
    cancelled_S = cancelled(trimmed_NS, sign_S)
    if cancelled_S.numpy().any():
        sign_S[cancelled_S] = majority()
    return disjoint_merge(trimmed_NS, sign_S, weights_N, how)


def cancelled(trimmed_NS: Tensor, sign_S: Tensor) -> Tensor:
    """Mask of the entries for which no sign is elected although some expert has one."""
    some = np.not_equal(trimmed_NS[0].numpy(), 0)
    for trimmed_S in trimmed_NS[1:]:
        some |= np.not_equal(trimmed_S.numpy(), 0)
    return torch.from_numpy(np.asarray(some & np.equal(sign_S.numpy(), 0)))


class Majority:
    """The sign that most entries of a model elect; counted, by one walk, when it is first asked for."""

    def __init__(self, vectors: TaskVectors, balance: Callable[[str, Tensor], int]) -> None:
        """`balance(name, deltas_NS)`: how many more entries of a block elect + than -."""
        self._vectors, self._balance_of = vectors, balance
        self._balance: int | None = None
        self._lock = threading.Lock()

    def sign(self) -> int:
        """1 or -1; a draw gives -1, as in the code of TIES' authors."""
        with self._lock:
            if self._balance is None:
                self._balance = self._counted()
        return 1 if self._balance > 0 else -1

    def _counted(self) -> int:
        sums: list[int] = []  # appended to by several threads
        self._vectors.visit(
            lambda name, deltas_NS: sums.append(self._balance_of(name, deltas_NS)), whole=True
        )
        return sum(sums)
